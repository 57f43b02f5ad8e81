"""Law 6 over the whole tree: nothing in it can turn data into code; and each form of it would be found."""

from pathlib import Path

import pytest

from tests.security.forbidden_calls import forbidden

ROOT = Path(__file__).parents[2]
ROOMS = ("sextet", "services", "shared", "examples", "bench", "scripts", "deploy")

PLANTED = [
    "import pickle",
    "import marshal as m",
    "from shelve import open",
    "from cloudpickle import loads",
    "import torch, dill.source",
    "eval('1')",
    "f = eval",
    "exec(text)",
    "compile(text, 'f', 'exec')",
    "__import__('os')",
    "import builtins\nbuiltins.exec(text)",
    "from builtins import eval as e",
    "getattr(object, 'eval')",
    "import yaml\nyaml.load(text)",
    "import yaml as y\ny.load(text, y.SafeLoader)",
    "import yaml\nyaml.full_load(text)",
    "from yaml import unsafe_load",
    "from yaml import UnsafeLoader as SafeLoader",
    "import torch\ntorch.load(path)",
    "import torch\ntorch.load(path, weights_only=False)",
    "import torch as t\nt.load(path, weights_only=flag)",
    "from torch import load",
    "load(path, weights_only=False)",
    "import numpy as np\nnp.load(path, allow_pickle=True)",
    "np.load(path, allow_pickle=given)",
    "AutoModel.from_pretrained(path, trust_remote_code=True)",
    "AutoTokenizer.from_pretrained(path)",
    "AutoModel.from_pretrained(path, trust_remote_code=False)",
    "AutoModelForCausalLM.from_config(config)",
    "LLM(**{'trust_remote_code': True})",
    "subprocess.run(text, shell=True)",
    "import os\nos.system(text)",
    "from os import popen",
    "import torch.distributed as dist\ndist.broadcast_object_list(items)",
    "from torch.distributed import all_gather_object",
    "import torch.distributed.checkpoint as dcp\ndef f(d):\n    dcp.load(state, checkpoint_id=d)",
    "import torch.distributed.checkpoint as dcp\ndef f(d):\n    dcp.load(state, checkpoint_id=d)\n    verify(d)",
    "from torch.distributed.checkpoint import load as read\ndef f(d):\n    read(state)",
    "from torch.distributed.checkpoint import FileSystemReader as R\nclass A:\n    def f(self):\n        R(1)",
    "import torch\ndef f(d):\n    torch.distributed.checkpoint.load(state, checkpoint_id=d)",
    "from torch.distributed import checkpoint\ndef f(d):\n    checkpoint.load(state, checkpoint_id=d)",
    "import torch.distributed.checkpoint as dcp\ndef f(d):\n    verify(d)\n    def g():\n        dcp.load(state)",
]

HARMLESS = [
    "model.eval()",
    "re.compile(r'x')",
    "redis.eval(script, 1, key)",
    "import yaml\nyaml.safe_load(text)",
    "import yaml\nclass L(yaml.SafeLoader): ...",
    "import torch\ntorch.load(path, weights_only=True)",
    "json.load(file)",
    "AutoConfig.from_pretrained(path, trust_remote_code=False)",
    "REFUSED = {'trust_remote_code': 'code of a model is never run'}",
    "text = 'import pickle; eval(1)'",
    "from shared.training import checkpoint\ndef f(d):\n    checkpoint.load(d)",
    "import torch.distributed.checkpoint as dcp\ndef f(d):\n    dcp.async_save(state, checkpoint_id=d)",
    "import torch.distributed.checkpoint as dcp\ndef f(d):\n    verify(d)\n    dcp.load(state, checkpoint_id=d)",
    "from torch.distributed.checkpoint.state_dict import get_model_state_dict",
]


@pytest.mark.parametrize("source", PLANTED)
def test_every_form_of_it_is_found(source: str) -> None:
    assert forbidden(source)


@pytest.mark.parametrize("source", HARMLESS)
def test_what_only_looks_like_it_is_allowed(source: str) -> None:
    assert forbidden(source) == []


@pytest.mark.parametrize("room", ROOMS)
def test_nothing_in_the_tree_executes_data(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    assert [line for path in files for line in forbidden(path.read_text(), str(path.relative_to(ROOT)))] == []
