"""What the fuzzer found, each as a test of its own."""

import contextlib
import json
import random
import time
from pathlib import Path

import httpx
import pytest

from services.controller import runs as runs_module
from services.rollout.kept import KeptSamples, Place
from shared.batch import refs
from shared.batch.block import Block, MissingColumn, RowKey
from shared.batch.join import plan
from shared.batch.spool import Spool
from shared.config import ConfigError, dump_config
from shared.config_loading import load_config, parse_config
from shared.gen.sextet.v1 import batch_pb2, common_pb2, controller_pb2, controller_pb2_grpc, rollout_pb2
from shared.rpc.client import Connections, call, stream
from shared.rpc.errors import InvalidArgument
from shared.training.role import compute
from tests.fakes.role import CONFIG_JSON, TOKEN
from tests.security import fuzz
from tests.security.serving import real_controller

ROWS = [common_pb2.RowKey(uid="1:0:0", sample=sample) for sample in range(2)]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3]])
def test_a_reference_with_tokens_of_other_rows_is_a_wrong_argument(tokens: list[int]) -> None:
    """ScoreBatch #26: INTERNAL ValueError: zip() argument 2 is longer than argument 1."""
    ref = batch_pb2.BatchRef(blocks=[batch_pb2.BlockRef(endpoint="a:1", block="b", rows=ROWS, tokens=tokens)])
    with pytest.raises(InvalidArgument, match=rf"'b' on a:1: 2 rows, and tokens of {len(tokens)}"):
        refs.row_tokens(ref)
    with pytest.raises(InvalidArgument, match=r"2 rows, and tokens of"):
        refs.select_rows(ref, [RowKey("1:0:0", 0)])


@pytest.mark.parametrize("dtype", [0, 77])
def test_a_column_of_an_unknown_type_is_a_wrong_argument(dtype: int) -> None:
    """Actor.Update #143: INTERNAL Corrupt: unknown element type 0."""
    block = batch_pb2.BlockRef(block="b", columns=[batch_pb2.Column(name="score", dtype=dtype)])
    with pytest.raises(InvalidArgument, match=rf"column 'score' has the unknown element type {dtype}"):
        plan(batch_pb2.BatchRef(blocks=[block]), None, None)


async def test_a_batch_without_the_columns_of_an_update_is_a_wrong_argument() -> None:
    """Actor.Update #15: INTERNAL KeyError: no column 'response_mask'."""
    empty = Block((), {})
    with pytest.raises(InvalidArgument, match=r"^no column 'response_mask'; the block has none$"):
        await compute(lambda: empty["response_mask"])
    with pytest.raises(KeyError):
        _ = empty["response_mask"]
    assert issubclass(MissingColumn, ValueError)


async def test_a_cursor_that_is_none_is_a_wrong_argument(tmp_path: Path) -> None:
    """WatchRun #9: INTERNAL ValueError: invalid literal for int()."""
    async with real_controller(tmp_path) as entry:
        connections = Connections(TOKEN)
        stub = controller_pb2_grpc.ControllerServiceStub(connections.channel(entry.endpoint))
        create = controller_pb2.CreateRunRequest(config_json=CONFIG_JSON, id="r")
        await call(stub.CreateRun, create, timeout=5)
        for after in ("x", "NaN", "\x00", "../../x", "1-", "-1", "1-2-3", "9" * 30):
            watch = controller_pb2.WatchRunRequest(id="r", after=after)
            with pytest.raises(InvalidArgument, match=r"after: .* is no cursor"):
                _ = [each async for each in stream(stub.WatchRun, watch, timeout=5)]
        await connections.close()


async def test_only_steps_that_were_played_are_looked_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generate #3053: a thread went from step 3 to 4,294,967,295 by way of the disk, and the process could not end."""
    spool = Spool(tmp_path, 10**6)
    spool.open("r", "c")
    for step in (2, 7, 9):
        assert spool.add(step, "0", Block((RowKey("u", 0),), {}))
    looked: list[int] = []

    def find(step: int, label: str, wanted: object) -> list[Block]:
        looked.append(step)
        assert len(looked) < 10
        return []

    monkeypatch.setattr(spool, "find", find)
    far = 2**32 - 1
    request = rollout_pb2.GenerateRequest(prompts=[rollout_pb2.PromptRow(uid="", step=3)], since=2)
    assert await KeptSamples(spool).find(Place(far, 0, greedy=False), [], request) == []
    assert await KeptSamples(spool).conversations(Place(far, 0, greedy=False), [], request) == {}
    assert looked == [far, 7, 9] * 2
    assert spool.steps(2, 9) == [2, 7]


BODIES = [
    b"", b"{", b"\xff\xfe", b"[]", b"null", b'{"config": null}', b'{"config": {"a": ' + b"[" * 100_000,
    b'{"config": {"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}", b'{"config": {"seed": 1e999}}',
    b'{"config": {"seed": NaN}}', b'{"config": {"seed": ' + b"9" * 5000 + b"}}", b'{"config": {"\\ud800": 1}}',
    b'{"config": {"model": {"path": "\\ud800"}}}', b'{"config": {"name": "a\\udfff"}, "id": "q"}',
    b'{"config": {}, "id": "\\ud800"}', b'{"config": {}, "id": "../x"}', b'{"config": {}, "more": 1}',
]  # fmt: skip


async def test_http_bodies_that_are_no_run_are_wrong_arguments_in_the_words_of_the_api(tmp_path: Path) -> None:
    """500 for half a character in a text, and answers without "error" where FastAPI's own refusals spoke."""
    complete = json.loads(CONFIG_JSON) | {"name": "\ud800"}
    async with real_controller(tmp_path) as entry:
        headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
        async with httpx.AsyncClient(base_url=f"http://{entry.facts['http']}", headers=headers) as client:
            for body in [*BODIES, json.dumps({"config": complete, "id": "q"}).encode()]:
                answer = await client.post("/v1/runs", content=body)
                assert (answer.status_code, answer.json()["code"]) == (400, "INVALID_ARGUMENT"), body[:60]
            assert (await client.get("/v1/runs")).json() == {"runs": []}
            missing = await client.get("/v1/nowhere")
            assert (missing.status_code, missing.json()["code"]) == (404, "NOT_FOUND")


@pytest.mark.parametrize("algorithm", [[], [1], {"preset": {}}, {"preset": []}, 5, True, "nothing"])
def test_an_algorithm_that_is_no_section_is_refused(algorithm: object) -> None:
    """Configure #2419: INTERNAL AttributeError: 'list' object has no attribute 'get'."""
    text = json.dumps(json.loads(CONFIG_JSON) | {"algorithm": algorithm})
    with pytest.raises(ConfigError, match=r"algorithm"):
        parse_config(text)


@pytest.mark.parametrize("key", ["total_steps", "total_epochs", "seed"])
def test_a_number_that_no_message_holds_is_refused(key: str) -> None:
    """CreateRun #1066: INTERNAL Value out of range: the run was there, and no list of runs could be sent any more."""
    with pytest.raises(ConfigError, match=rf"{key}: {2**70} does not fit into 64 bits"):
        parse_config(json.dumps(json.loads(CONFIG_JSON) | {key: 2**70}))


def test_mutated_configurations_are_refused_in_words() -> None:
    complete = dump_config(load_config(CONFIG_JSON))
    for index in range(1500):
        rng = random.Random(f"{fuzz.SEED}:config:{index}")
        text = CONFIG_JSON if index % 2 else complete
        for _ in range(rng.choice((1, 1, 2, 3))):
            text = fuzz.odd_json(rng, text)
        with contextlib.suppress(ConfigError):
            dump_config(parse_config(text))


def test_a_configuration_cut_short_is_refused_at_once() -> None:
    """CreateRun: 40 KB of JSON without its end were read as YAML for 1.5 s, and nothing else was served meanwhile."""
    began = time.process_time()
    for text in ('{"a":[' + "1," * 500_000, '{"a":' * 50_000, "{" * 100_000, '{"a": "' + "x" * 1_000_000):
        with pytest.raises(ConfigError, match=r"not a JSON object"):
            parse_config(text)
    assert time.process_time() - began < 3


def test_a_configuration_that_is_a_path_is_not_read(tmp_path: Path) -> None:
    """CreateRun took whatever did not begin with a brace as the name of a file of the controller's machine."""
    path = tmp_path / "config.json"
    path.write_text(CONFIG_JSON)
    assert load_config(path)
    for text in (str(path), json.dumps(str(path)), "", "[]", "null"):
        with pytest.raises(ConfigError, match=r"not a JSON object"):
            parse_config(text)
        with pytest.raises(InvalidArgument, match=r"not a JSON object"):
            runs_module._checked(text)


@pytest.mark.parametrize("text", ['{"a":' * 50_000 + "1" + "}" * 50_000, "[" * 50_000, '{"model": ' + "[" * 50_000])
def test_a_configuration_that_is_nested_too_deeply_is_refused(text: str, tmp_path: Path) -> None:
    """Configure: INTERNAL RecursionError."""
    with pytest.raises(ConfigError):
        parse_config(text)
    path = tmp_path / "deep.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"nested too deeply"):
        load_config(path)
