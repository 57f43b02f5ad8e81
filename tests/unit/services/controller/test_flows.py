"""Each flow over fake roles: which roles it needs, what it calls, what it trains on."""

import json
from pathlib import Path
from typing import Any

import pytest

from shared.rpc.errors import InvalidArgument
from tests.fakes.sextet import FakeSextet
from tests.unit.services.controller.conftest import ALL, Controller

GRPO: dict[str, Any] = {"flow": "grpo", "algorithm": {"advantage": "grpo"}}
EXAMPLE = Path(__file__).parents[4] / "examples" / "custom_flow.py"


async def played(controller: Controller, **changes: Any) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of a run that must end well."""
    record = await controller.create(**changes)
    await controller.over(record.id)
    assert (record.state, record.reason) == ("done", "")
    return [json.loads(line) for line in (Path(record.directory) / "metrics.jsonl").read_text().splitlines()]


async def test_grpo_needs_neither_critic_nor_reference(fakes: FakeSextet, controller: Controller) -> None:
    await fakes.start("rollout-0", "reward-0", "actor-0")
    lines = await played(controller, **GRPO)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert fakes["actor-0"].columns_seen == ["old_logprobs", "response_ids", "score", "versions"]


async def test_grpo_asks_the_reference_when_kl_wants_it(fakes: FakeSextet, controller: Controller) -> None:
    await fakes.start("rollout-0", "reward-0", "actor-0", "reference-0")
    await played(controller, flow="grpo", algorithm={"advantage": "grpo", "kl": {"placement": "loss"}})
    assert "ref_logprobs" in fakes["actor-0"].columns_seen


async def test_ppo_trains_the_critic_alone_while_it_warms_up(fakes: FakeSextet, controller: Controller) -> None:
    await fakes.start(*ALL)
    lines = await played(controller, critic={"warmup_steps": 2})
    assert fakes["critic-0"].done["update"] == 3
    assert fakes["actor-0"].done["update"] == fakes["rollout-0"].done["commit_weights"] == 1
    assert ["actor.update/loss" in line for line in lines] == [False, False, True]


async def test_remax_generates_a_greedy_row_for_each_prompt(fakes: FakeSextet, controller: Controller) -> None:
    await fakes.start("rollout-0", "reward-0", "actor-0")
    await played(controller, flow="remax", algorithm={"advantage": "remax"}, total_steps=1)
    rows = fakes["rollout-0"].rows["rollout.generate"]
    assert sorted(key.sample for key in rows) == [0] * 4 + [1] * 4 + [2] * 4
    assert set(rows.values()) == {1}


async def test_dapo_refills_until_it_has_enough_prompts(fakes: FakeSextet, controller: Controller) -> None:
    await fakes.start("rollout-0", "reward-0", "actor-0")
    lines = await played(controller, flow="dapo", algorithm={"advantage": "grpo"})
    assert [line["dapo/prompts_kept"] for line in lines] == [4, 4, 4]
    assert max(line["dapo/prompts_drawn"] for line in lines) > 4
    assert len(fakes["actor-0"].rows["update"]) == 3 * 4 * 2
    # What one step threw away does not come back in the next: indices go on in the dataset's order.
    uids = {key.uid for key in fakes["rollout-0"].rows["rollout.generate"]}
    assert len(uids) == sum(line["dapo/prompts_drawn"] for line in lines)


@pytest.mark.parametrize("tokens", [4, 0])
async def test_dapo_ends_after_its_refills(fakes: FakeSextet, controller: Controller, tokens: int) -> None:
    await fakes.start("rollout-0", "reward-0", "actor-0")
    # Without tokens every score is 0: nothing to learn from, ever.
    fakes["rollout-0"].response_tokens = tokens
    fakes["rollout-0"].same_length = tokens == 0
    options = {"max_refills": 1 if tokens == 0 else 0}
    algorithm = {"advantage": "grpo"}
    lines = await played(controller, flow="dapo", algorithm=algorithm, options=options, total_steps=1, seed=3)
    assert lines[0]["dapo/prompts_drawn"] == 4 * (1 + options["max_refills"])
    assert lines[0]["dapo/prompts_kept"] in ([1, 2, 3] if tokens else [0])
    assert fakes["actor-0"].done["update"] == (1 if tokens else 0)


async def test_the_example_flow(fakes: FakeSextet, controller: Controller) -> None:
    await fakes.start("rollout-0", "reward-0", "actor-0")
    flow = f"{EXAMPLE}:HardPrompts"
    lines = await played(controller, flow=flow, algorithm={"advantage": "rloo"}, options={"easy": 0.6})
    kept = [line["hard_prompts/kept"] for line in lines]
    assert sum(kept) < 12
    assert len(fakes["actor-0"].rows["update"]) == 2 * sum(kept)
    with pytest.raises(InvalidArgument, match=r"options\.easy='x' is not a number"):
        await controller.create(flow=flow, options={"easy": "x"})


CUSTOM = """
from services.controller.flows.base import DataFlow
class Flow(DataFlow):
    def forward(self, prompts):
        {body}
"""


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return 3", "forward returned 3: return self.metrics(...)"),
        ("raise KeyError('x')", "forward: 'x'"),
        ("return self.metrics(self.reward.score(None))", "reward.score: called without rows"),
        ("import asyncio; raise asyncio.CancelledError", "CancelledError: the run was cancelled from within"),
    ],
)
async def test_a_flow_with_a_defect_fails_its_run_only(
    fakes: FakeSextet, controller: Controller, tmp_path: Path, body: str, reason: str
) -> None:
    await fakes.start("rollout-0", "reward-0", "actor-0")
    (tmp_path / "flow.py").write_text(CUSTOM.format(body=body))
    record = await controller.create(flow=f"{tmp_path / 'flow.py'}:Flow", algorithm={"advantage": "grpo"})
    await controller.over(record.id)
    assert record.state == "failed"
    assert reason in record.reason
    await played(controller, **GRPO, total_steps=1)


async def test_the_same_question_before_and_after_an_update_is_asked_twice(
    fakes: FakeSextet, controller: Controller, tmp_path: Path
) -> None:
    await fakes.start("rollout-0", "reward-0", "actor-0")
    body = """
        samples = self.rollout.generate(prompts)
        old = self.actor.logprobs(samples)
        batch = self.actor.advantages(samples, self.reward.score(samples), old)
        first = self.actor.update(batch)
        second = self.actor.update(batch, after=self.sync_weights(after=first))
        again = self.actor.logprobs(samples, after=second)
        self.sync_weights(after=again)
        return self.metrics(second)
    """
    (tmp_path / "flow.py").write_text(CUSTOM.format(body=body.strip()))
    lines = await played(
        controller, flow=f"{tmp_path / 'flow.py'}:Flow", algorithm={"advantage": "grpo"}, total_steps=1
    )
    assert fakes["actor-0"].done["update"] == fakes["actor-0"].done["logprobs"] == 2
    assert fakes["rollout-0"].done["commit_weights"] == 2
    assert lines[0]["actor.update/version"] == 2
