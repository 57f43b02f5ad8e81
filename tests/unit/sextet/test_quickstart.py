"""The quickstart: configurations in the making, checked datasets, and a trainer over a controller it is given."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from examples.demo.reward import compute_score
from sextet import quickstart
from sextet.draft import ConfigDraft, UnknownKey
from sextet.quickstart import DatasetBuilder, PPOTrainer, TrainingError, get_ppo_config
from shared.config import ConfigError, RunConfig
from shared.config_loading import load_config
from shared.data.datasets import DataError
from shared.gen.sextet.v1 import controller_pb2 as pb
from shared.rpc.errors import Unavailable
from tests.fakes.tiny import write_tiny_llama

REWARD = "examples/demo/reward.py:compute_score"


def row(prompt: object, **columns: object) -> dict[str, Any]:
    plain = {"data_source": "letters", "ability": "x", "reward_model": {"style": "rule", "ground_truth": "a"}}
    return {**plain, "prompt": prompt, "extra_info": {"index": 0}, **columns}


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def written(directory: Path, rows: list[dict[str, Any]]) -> Path:
    path = directory / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


class TestConfig:
    def test_settings_attributes_and_overrides_are_one_configuration(self) -> None:
        config = get_ppo_config(
            "m", ["actor.optimizer.lr=1e-6"], total_steps=3, rollout={"n": 4}, **{"critic.optimizer.lr": 1e-4}
        )
        config.actor.loss.clip_ratio_high = 0.3
        config.data.path = "d.parquet"
        made = PPOTrainer(config, reward=REWARD).config
        expected = {
            "flow": "ppo",
            "model": {"path": "m"},
            "data": {"path": "d.parquet"},
            "reward": {"function": REWARD},
            "total_steps": 3,
            "rollout": {"n": 4},
            "actor": {"optimizer": {"lr": 1e-6}, "loss": {"clip_ratio_high": 0.3}},
            "critic": {"optimizer": {"lr": 1e-4}},
            "algorithm": {"kl": {"placement": "reward"}},
        }
        assert made == load_config(expected)

    def test_unset_keys_read_as_their_defaults(self) -> None:
        config = get_ppo_config("m")
        assert config.actor.optimizer.lr == RunConfig.model_fields["actor"].default.optimizer.lr
        assert config.model.path == "m"
        assert config.critic.model is None
        with pytest.raises(ConfigError, match=r"data\.path is not set"):
            _ = config.data.path

    def test_one_epoch_unless_a_length_is_set(self) -> None:
        assert get_ppo_config("m").tree()["total_epochs"] == 1
        config = get_ppo_config("m")
        config.total_steps = 7
        assert "total_epochs" not in config.tree()

    @pytest.mark.parametrize(
        ("settings", "overrides", "message"),
        [
            ({"totl_steps": 3}, [], "'totl_steps'; did you mean 'total_steps'"),
            ({"actor": {"optimiser": {"lr": 1}}}, [], "'actor.optimiser'; did you mean 'actor.optimizer'"),
            ({}, ["actor.optimizer.lrr=1"], "'actor.optimizer.lrr'; did you mean 'actor.optimizer.lr'"),
            ({"seed.x": 1}, [], "seed is a value, not a section"),
            ({}, ["actor.optimizer.lr"], "not key=value"),
        ],
    )
    def test_an_unknown_key_is_named_with_the_nearest(
        self, settings: dict[str, Any], overrides: list[str], message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
            get_ppo_config("m", overrides, **settings)

    def test_an_unknown_attribute_is_refused_when_set_and_read(self) -> None:
        config = get_ppo_config("m")
        with pytest.raises(UnknownKey, match=r"'actor\.optimizer\.lerning_rate'"):
            config.actor.optimizer.lerning_rate = 1.0
        assert not hasattr(config, "actr")

    def test_a_wrong_value_is_named_when_the_run_is_made(self) -> None:
        config = get_ppo_config("m", total_steps=1)
        config.actor.optimizer.lr = -1.0
        with pytest.raises(ConfigError, match=r"actor\.optimizer\.lr.*got -1\.0"):
            PPOTrainer(config, "d.parquet", REWARD)

    def test_a_preset_can_be_gone_on_with(self) -> None:
        config = ConfigDraft.of({"algorithm": "dapo"})
        config.algorithm.gamma = 0.9
        assert config.tree()["algorithm"] == {"preset": "dapo", "gamma": 0.9}

    def test_the_trainer_leaves_the_callers_configuration_alone(self) -> None:
        config = get_ppo_config("m", total_steps=1)
        PPOTrainer(config, "d.parquet", REWARD)
        assert "data" not in config.tree()


class TestDataset:
    def test_tokens_are_those_of_the_chat_template(self, model: Path, tmp_path: Path) -> None:
        path = written(tmp_path, [row(chat("ab")), row(chat("cde"))])
        data = DatasetBuilder(tokenizer=str(model), max_length=8).build_from_parquet(path)
        tokenizer = AutoTokenizer.from_pretrained(model)
        expected = [
            tokenizer.apply_chat_template(chat(text), add_generation_prompt=True)["input_ids"] for text in ("ab", "cde")
        ]
        assert data.input_ids == expected
        assert data.lengths == [2, 3]
        assert data[1]["ground_truth"] == "a"
        assert json.loads(data[1]["extra_info"])["index"] == 0

    @pytest.mark.parametrize(
        ("padding", "widths"), [(False, [2, 3]), ("do_not_pad", [2, 3]), (True, [3, 3]), ("max_length", [8, 8])]
    )
    def test_padding_is_hugging_faces(self, model: Path, tmp_path: Path, padding: Any, widths: list[int]) -> None:
        tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
        path = written(tmp_path, [row(chat("ab")), row(chat("cde"))])
        data = DatasetBuilder(tokenizer=tokenizer, max_length=8, padding=padding).build_from_parquet(path)
        assert [len(ids) for ids in data.input_ids] == widths
        assert data.lengths == [2, 3] == [sum(mask) for mask in data.attention_mask]
        padded = widths[0] - 2
        assert data.input_ids[0][:padded] == [tokenizer.pad_token_id] * padded

    def test_empty_and_long_prompts_are_named(self, model: Path, tmp_path: Path) -> None:
        path = written(tmp_path, [row(chat("ab")), row(chat("")), row(chat("abcdefghi"))])
        with pytest.raises(DataError, match="row 1 is empty, row 2 has 9 tokens; prompts have 1 to 8 tokens"):
            DatasetBuilder(tokenizer=str(model), max_length=8).build_from_parquet(path)

    def test_missing_columns_are_named(self, model: Path, tmp_path: Path) -> None:
        path = written(tmp_path, [{"prompt": "ab", "answer": "c"}])
        with pytest.raises(DataError, match="no column data_source and no column reward_model; it has prompt, answer"):
            DatasetBuilder(tokenizer=str(model)).build_from_parquet(path)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"padding": "longst"}, "padding='longst' is unknown; did you mean 'longest'"),
            ({"max_length": 0}, "max_length=0"),
            ({"tokenizer": "./nowhere"}, "tokenizer './nowhere' can't be loaded"),
        ],
    )
    def test_bad_arguments_are_named(self, model: Path, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(DataError, match=message):
            DatasetBuilder(**{"tokenizer": str(model), **arguments})

    def test_the_trainer_takes_path_and_length(self, model: Path, tmp_path: Path) -> None:
        path = written(tmp_path, [row(chat("ab"))])
        data = DatasetBuilder(tokenizer=str(model), max_length=8).build_from_parquet(path)
        config = PPOTrainer(get_ppo_config(str(model)), data, REWARD).config
        assert (config.data.path, config.data.max_prompt_tokens) == (str(path), 8)


class TestReward:
    def test_a_function_becomes_file_and_name(self) -> None:
        assert quickstart.reward_name(compute_score) == REWARD

    @pytest.mark.parametrize("function", [lambda **k: 0.0, len, compute_score.__call__])
    def test_what_another_process_cannot_load_is_refused(self, function: Any) -> None:
        with pytest.raises(ConfigError, match="not a function at the top of a file"):
            quickstart.reward_name(function)

    def test_a_function_of_the_running_script_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compute_score, "__module__", "__main__")
        with pytest.raises(ConfigError, match="move it to a file of its own"):
            quickstart.reward_name(compute_score)


class FakeClient:
    """Plays the events of one run and keeps what is asked of it."""

    def __init__(self, events: list[Any], state: str, reason: str = "") -> None:
        self.events, self.cancelled = events, []
        self.run = pb.Run(id="r1", state=state, reason=reason, directory="runs/r1")

    def __enter__(self) -> "FakeClient":
        return self

    def __exit__(self, *error: object) -> None: ...

    def create_run(self, config: RunConfig, id: str) -> pb.Run:
        self.created = id
        if self.run.state == "queued":
            raise KeyboardInterrupt
        return self.run

    def get_run(self, run: str) -> pb.Run:
        return self.run

    def cancel(self, run: str) -> None:
        self.cancelled.append(run)

    def watch(self, run: str) -> Iterator[pb.RunEvent]:
        for event in self.events:
            if isinstance(event, BaseException):
                raise event
            yield event


def step(number: int, reward: float) -> pb.RunEvent:
    metrics = {"reward": reward, "kl": 0.0, "response_length": 4.0, "seconds": 1.5}
    return pb.RunEvent(kind="step", step=number, message=f"step {number} of 2", metrics=metrics)


class TestTraining:
    def trainer(self, client: FakeClient, monkeypatch: pytest.MonkeyPatch, told: list[str]) -> PPOTrainer:
        monkeypatch.setenv("SEXTET_CONTROLLER", "127.0.0.1:1")
        monkeypatch.setattr(quickstart, "Client", lambda endpoint: client)
        return PPOTrainer(get_ppo_config("m", total_steps=2), "d.parquet", REWARD, tell=told.append)

    def test_a_finished_run_gives_its_results(self, monkeypatch: pytest.MonkeyPatch) -> None:
        saved = pb.RunEvent(kind="checkpoint", step=2, message="runs/r1/checkpoints/step_2")
        told: list[str] = []
        # Step 1 is played twice, as after a recovery: what was committed last counts.
        client = FakeClient([step(1, 0.1), step(1, 0.2), step(2, 0.3), saved], "done")
        result = self.trainer(client, monkeypatch, told).train()
        assert [metrics["reward"] for metrics in result.metrics] == [0.2, 0.3]
        assert (result.model_path, result.checkpoint_path) == ("runs/r1/model", "runs/r1/checkpoints/step_2")
        assert told[-1] == "step 2 of 2: reward 0.300  kl 0.000  length 4.0  1.5 s"
        assert client.cancelled == []

    @pytest.mark.parametrize(
        ("state", "reason"), [("failed", "model.path: there is no directory 'm'"), ("cancelled", "")]
    )
    def test_a_run_that_did_not_finish_raises_its_reason(
        self, monkeypatch: pytest.MonkeyPatch, state: str, reason: str
    ) -> None:
        with pytest.raises(TrainingError, match=f"run r1 {state}.*{reason}"):
            self.trainer(FakeClient([], state, reason), monkeypatch, []).train()

    def test_ctrl_c_cancels_the_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        client = FakeClient([step(1, 0.1), KeyboardInterrupt()], "running")
        with pytest.raises(KeyboardInterrupt):
            self.trainer(client, monkeypatch, []).train()
        assert client.cancelled == [client.created]

    def test_ctrl_c_cancels_a_run_whose_creation_it_cut_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The controller may have made it: it was played for nobody."""
        client = FakeClient([], "queued")
        with pytest.raises(KeyboardInterrupt):
            self.trainer(client, monkeypatch, []).train()
        assert client.cancelled == [client.created]

    def test_a_lost_controller_is_what_is_raised(self, monkeypatch: pytest.MonkeyPatch) -> None:
        client = FakeClient([Unavailable("gone")], "running")
        client.cancel = lambda run: (_ for _ in ()).throw(Unavailable("still gone"))  # type: ignore[method-assign]
        with pytest.raises(Unavailable, match=r"^gone"):
            self.trainer(client, monkeypatch, []).train()

    def test_without_services_they_are_started_and_ended(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        asked: list[Any] = []

        @contextlib.contextmanager
        def local(**arguments: Any) -> Iterator[Any]:
            asked.append(arguments["replicas"])
            yield type("Services", (), {"endpoint": "127.0.0.1:2"})
            asked.append("ended")

        told: list[str] = []
        trainer = self.trainer(FakeClient([step(1, 0.1)], "done"), monkeypatch, told)
        monkeypatch.delenv("SEXTET_CONTROLLER")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(quickstart, "LocalServices", local)
        trainer.train()
        assert asked == [{"rollout": 1}, "ended"]


def test_importing_the_quickstart_brings_no_torch() -> None:
    code = "import sys, sextet.quickstart; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_package_exports_lazily() -> None:
    code = (
        "import sys, sextet; assert 'pydantic' not in sys.modules; "
        "assert all(getattr(sextet, name) for name in sextet.__all__); "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
