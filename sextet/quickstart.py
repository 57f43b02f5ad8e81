"""Training in a few lines, as verl's users know it; torch-free until a dataset's tokenizer is loaded by name.

    config = get_ppo_config(model_name="models/smollm2", total_steps=30)
    config.actor.optimizer.lr = 1e-5
    data = DatasetBuilder(tokenizer="models/smollm2", max_length=64).build_from_parquet("data/chain_sum.parquet")
    result = PPOTrainer(config, data, reward="examples/rewards/reasoning_gym_reward.py:compute_score").train()

The training itself happens in the six services: those that run already, else ones started for this call.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sextet.client import Client, run_id
from sextet.dataset import DatasetBuilder, PromptDataset
from sextet.draft import ConfigDraft
from sextet.endpoint import find_controller
from sextet.local import LocalServices
from shared.config import ConfigError, RunConfig
from shared.config_loading import load_config
from shared.gen.sextet.v1 import controller_pb2 as pb
from shared.rpc.errors import SextetError, Unavailable

__all__ = [
    "ConfigDraft",
    "DatasetBuilder",
    "PPOTrainer",
    "PromptDataset",
    "TrainingError",
    "TrainingResult",
    "get_ppo_config",
]

Reward = str | Callable[..., Any]


class TrainingError(RuntimeError):
    """A run that did not end as done; the text is its reason."""


@dataclass(frozen=True)
class TrainingResult:
    """A finished run.

    Attributes:
        run: its id.
        metrics: one mapping for each step, in order: reward, kl, response_length, seconds, "actor.update/loss" ...
        model_path: the trained policy as a Hugging Face directory; None with checkpoint.export=false.
        checkpoint_path: the last checkpoint; None when none was saved.
        directory: the run's: metrics, summary, checkpoints, model.
    """

    run: str
    metrics: list[dict[str, float]]
    model_path: str | None
    checkpoint_path: str | None
    directory: str


def get_ppo_config(model_name: str, overrides: Sequence[str] = (), **settings: Any) -> ConfigDraft:
    """A PPO configuration (GAE, KL in the reward) to go on with by attribute: `config.actor.optimizer.lr = 1e-6`.

    Args:
        model_name: hub id or directory.
        overrides: dotted, as on the command line: `actor.optimizer.lr=1e-6`.
        settings: by key, nested or dotted: `total_steps=20`, `rollout={"n": 4}`, `**{"actor.optimizer.lr": 1e-6}`.

    Raises:
        ConfigError: an unknown key, with the nearest known one. Values are checked when the run is created.
    """
    draft = ConfigDraft()
    draft.update({"flow": "ppo", "model.path": model_name, "algorithm.kl.placement": "reward"})
    draft.update(settings)
    draft.apply(overrides)
    return draft


class PPOTrainer:
    """A run: created, followed to its end, and its results.

    Args:
        config: of `get_ppo_config`; or a RunConfig, mapping or file.
        dataset: of a `DatasetBuilder`, or a file; default: config's data.path.
        reward: `module:name`, `path/to/file.py:name`, or a function defined in a file of its own; default: config's.
        tell: told each step in a line; None: nobody.

    Raises:
        ConfigError: the configuration can't be used; names the key.
    """

    def __init__(
        self,
        config: ConfigDraft | RunConfig | Mapping[str, Any] | str | Path,
        dataset: PromptDataset | str | Path | None = None,
        reward: Reward | None = None,
        *,
        tell: Callable[[str], None] | None = print,
    ) -> None:
        draft = ConfigDraft.of(config)
        if isinstance(dataset, PromptDataset):
            draft.update({"data.path": dataset.path, "data.prompt_key": dataset.prompt_key})
            draft.update({"data.max_prompt_tokens": dataset.max_length})
        elif dataset is not None:
            draft.update({"data.path": str(dataset)})
        if reward is not None:
            draft.update({"reward.backend": "function", "reward.function": reward_name(reward)})
        self.config = load_config(draft.tree())
        self._tell = tell or (lambda line: None)

    def train(self) -> TrainingResult:
        """Trains to the end. Ctrl-C cancels the run.

        Raises:
            TrainingError: the run failed or was cancelled; says why.
            LocalError: no services run, and they could not be started here.
        """
        with self._services() as endpoint, Client(endpoint) as client:
            id = run_id()
            try:
                client.create_run(self.config, id=id)
                metrics, checkpoint = self._follow(client, id)
            except BaseException:
                # Nobody follows it any more: it must not keep the services busy.
                with contextlib.suppress(SextetError):
                    client.cancel(id)
                raise
            return self._result(client.get_run(id), metrics, checkpoint)

    @contextlib.contextmanager
    def _services(self) -> Iterator[str]:
        try:
            endpoint = find_controller()
        except Unavailable:
            with LocalServices(replicas={"rollout": self.config.rollout.replicas}, tell=self._tell) as services:
                yield services.endpoint
        else:
            yield endpoint

    def _follow(self, client: Client, run: str) -> tuple[list[dict[str, float]], str | None]:
        steps: dict[int, dict[str, float]] = {}
        checkpoint = None
        for event in client.watch(run):
            if event.kind == "step":
                # A step played again after a recovery replaces what it was.
                steps[event.step] = dict(event.metrics)
                self._tell(progress(event))
            elif event.kind == "checkpoint":
                checkpoint = event.message
            elif event.kind in ("state", "recovery", "warning", "error"):
                self._tell(f"{event.kind}: {event.message}")
        return [steps[step] for step in sorted(steps)], checkpoint

    def _result(self, run: pb.Run, metrics: list[dict[str, float]], checkpoint: str | None) -> TrainingResult:
        if run.state != "done":
            raise TrainingError(f"run {run.id} {run.state}" + (f": {run.reason}" if run.reason else ""))
        model = str(Path(run.directory) / "model") if self.config.checkpoint.export else None
        return TrainingResult(run.id, metrics, model, checkpoint, run.directory)


def progress(event: pb.RunEvent) -> str:
    """A step's headline numbers in a line."""
    shown = [f"{name} {event.metrics[name]:.3f}" for name in ("reward", "kl") if name in event.metrics]
    if "response_length" in event.metrics:
        shown.append(f"length {event.metrics['response_length']:.1f}")
    return f"{event.message}: " + "  ".join([*shown, f"{event.metrics['seconds']:.1f} s"])


def reward_name(reward: Reward) -> str:
    """`path/to/file.py:name` of a function; a name is left as it is.

    Raises:
        ConfigError: the reward service, another process, could not find this function.
    """
    if isinstance(reward, str):
        return reward
    name = getattr(reward, "__qualname__", repr(reward))
    try:
        file = Path(inspect.getsourcefile(reward) or "")
    except TypeError:
        file = Path()
    if not name.isidentifier() or not file.is_file():
        raise ConfigError(
            f"reward: {name} is not a function at the top of a file: the reward service loads it by name; "
            "write it in a file, or pass 'path/to/file.py:name'"
        )
    if reward.__module__ == "__main__":
        raise ConfigError(
            f"reward: {name} is defined in the script that trains ({file.name}); loading it would run the script again "
            "in the reward service: move it to a file of its own"
        )
    return f"{_shown(file)}:{name}"


def _shown(file: Path) -> str:
    here = Path.cwd()
    return str(file.relative_to(here)) if file.is_relative_to(here) else str(file)
