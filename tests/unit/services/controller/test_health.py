"""The health of replicas: the table written down again, what no sequence of signs may do, the pool that lives by it."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.controller.health import Health, Sign, advance, sign_of
from services.controller.pool import Pool
from services.controller.replica import Member, Phase
from shared.config import RecoveryConfig
from shared.rpc.client import Connections
from shared.rpc.errors import FailedPrecondition
from shared.state.registry import Replica
from tests.fakes.sextet import TOKEN, FakeSextet
from tests.unit.services.controller.conftest import ALL, Controller
from tests.unit.services.controller.test_failures import outcome

H, S = Health, Sign
MOVES = {
    H.HEALTHY: {S.FAILS: H.SUSPECT, S.LOST: H.DEAD, S.BACK: H.RESTARTING, S.OUTDATED: H.STALE},
    H.SUSPECT: {S.ANSWERS: H.HEALTHY, S.LOST: H.DEAD, S.BACK: H.RESTARTING, S.OUTDATED: H.STALE},
    H.DEAD: {S.BACK: H.RESTARTING},
    H.RESTARTING: {S.LOST: H.DEAD, S.LOADED: H.STALE},
    H.STALE: {S.LOST: H.DEAD, S.BACK: H.RESTARTING, S.CURRENT: H.HEALTHY},
}


@pytest.mark.parametrize("health", Health)
@pytest.mark.parametrize("sign", Sign)
def test_every_cell_of_the_table(health: Health, sign: Sign) -> None:
    assert advance(health, sign) is MOVES[health].get(sign, health)


@given(st.lists(st.sampled_from(Sign)))
def test_a_lost_replica_serves_again_only_by_the_whole_way_round(signs: list[Sign]) -> None:
    health, way = Health.RESTARTING, [S.LOADED, S.CURRENT]
    for sign in signs:
        health = advance(health, sign)
        # Written down a second time: what is still to be seen, in this order, before it may serve.
        if sign is S.LOST:
            way = [S.BACK, S.LOADED, S.CURRENT]
        elif sign is S.BACK and S.BACK not in way:
            way = [S.LOADED, S.CURRENT]
        elif sign is S.OUTDATED and not way:
            way = [S.CURRENT]
        elif way and sign is way[0]:
            way = way[1:]
        if way:
            assert health not in (H.HEALTHY, H.SUSPECT)
        else:
            assert health in (H.HEALTHY, H.SUSPECT)


@pytest.mark.parametrize(
    ("state", "sign"),
    [("ready", S.ANSWERS), ("busy", S.ANSWERS), ("suspect", S.FAILS), ("dead", S.LOST), ("restarting", S.BACK)],
)
def test_what_a_replica_says_of_itself(state: str, sign: Sign) -> None:
    assert sign_of(state) is sign
    assert sign_of("draining") is None


async def test_the_pool_uses_a_replica_again_only_after_it_was_prepared_again() -> None:
    connections, prepared = Connections(TOKEN), []
    pool = Pool("rollout", connections)

    async def prepare(member: Member) -> None:
        prepared.append(member.weights)
        member.weights = "now"

    def seen(state: str) -> list[Replica]:
        return [Replica("rollout", "r0", "127.0.0.1:1", "a", state, "run", 0, 0, {})]

    await pool.assign(prepare, RecoveryConfig())
    await pool.observe(seen("ready"))
    [member] = await pool.wait(1, 5)
    await pool.observe(seen("suspect"))
    assert (pool.ready(), member.health) == ([], Health.SUSPECT)
    await pool.observe(seen("busy"))
    assert pool.ready() == [member]
    await pool.observe(seen("dead"))
    assert pool.health("r0") == "dead"
    assert (pool.ready(), member.health, member.phase) == ([], Health.DEAD, Phase.READY)
    await pool.observe(seen("restarting"))
    assert (pool.ready(), member.health) == ([], Health.RESTARTING)
    await pool.observe(seen("ready"))
    assert await pool.wait(1, 5) == [member]
    assert prepared == ["", ""]
    pool.tend(member)
    assert (pool.ready(), member.health) == ([], Health.STALE)
    await pool.wait(1, 5)
    assert (prepared, pool.health("r0"), pool.health("other")) == (["", "", "now"], "", "")
    await pool.close()
    await connections.close()


async def test_rows_of_a_dead_engine_go_to_the_others_and_it_comes_back(
    fakes: FakeSextet, controller: Controller
) -> None:
    """As services/rollout/beside.py does it: calls end, the run is lost, the replica waits to be configured again."""
    await fakes.start(*ALL, "rollout-1")
    fake, deaths = fakes["rollout-0"], []

    async def die(request: Any) -> None:
        if request.operation.id.step == 2 and not deaths:
            deaths.append(fake.servicer.lose())
            fake.model, fake.now_version = "", -1
            fake.servicer.standing = "restarting"
            raise FailedPrecondition("the engine is dead: the engine has made no token for 9.0 s")

    async def until_it_is_back(request: Any) -> None:
        """Steps over fakes take no time: the last ones wait for the replica."""
        if request.operation.id.step == 3:
            async with asyncio.timeout(20):
                while fake.done["configure"] < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)

    fake.hooks["generate"] = die
    fakes["rollout-1"].hooks["generate"] = until_it_is_back
    first = await outcome(controller, fakes, total_steps=8)
    assert (deaths, fake.done["configure"]) == (["r"], 2)
    events = [message for kind, _, message in await controller.events("r") if kind == "recovery"]
    assert any("rollout-0" in message and "its share goes to the others" in message for message in events)
    made = {int(key.uid.partition(":")[0]) for key in fake.rows["rollout.generate"]}
    assert 1 in made
    assert made & {3, 4, 5, 6, 7, 8}
    assert await outcome(controller, fakes, "again", total_steps=8) == first
