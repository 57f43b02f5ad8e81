"""The quickstart as a user runs it: no services up, a model and a dataset on disk, a reward function in a file."""

import math
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM

from sextet.quickstart import DatasetBuilder, PPOTrainer, TrainingError, get_ppo_config
from tests.fakes.tiny import write_tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return solution_str.count('a')\n"


def test_services_start_train_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SEXTET_CONTROLLER", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_tiny_llama(tmp_path / "model")
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [
        {"data_source": "letters", "prompt": [{"role": "user", "content": text}], "reward_model": {"ground_truth": ""}}
        for text in ("abc", "de", "fghi", "jk")
    ]
    pq.write_table(pa.Table.from_pylist(rows), "train.parquet")
    data = DatasetBuilder(tokenizer="model", max_length=8).build_from_parquet("train.parquet")
    config = get_ppo_config("model", ["rollout.engine=hf"], total_steps=2, data={"batch_size": 2}, rollout={"n": 2})
    config.rollout.max_tokens = 6

    result = PPOTrainer(config, data, reward="reward.py:compute_score").train()

    assert [math.isfinite(step["actor.update/loss"]) for step in result.metrics] == [True, True]
    assert result.checkpoint_path is not None
    assert Path(result.checkpoint_path, "run.json").is_file()
    assert result.model_path is not None
    assert AutoModelForCausalLM.from_pretrained(result.model_path).config.vocab_size == 64
    assert psutil.Process().children(recursive=True) == []

    config.model.path = "./nowhere"
    with pytest.raises(TrainingError, match=r"model\.path: there is no directory './nowhere'"):
        PPOTrainer(config, data, reward="reward.py:compute_score").train()
