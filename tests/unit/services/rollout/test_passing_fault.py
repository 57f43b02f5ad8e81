"""A fault of the engine that passes by itself."""

from types import SimpleNamespace
from typing import Any

import pytest

from services.rollout.backend import EngineError
from services.rollout.role import RolloutRole
from shared.rpc.errors import FailedPrecondition


class Engine:
    """Fails over every row; `answer` is what it says of its health."""

    beats, answer = 0, "out of memory"

    async def health(self) -> str:
        return self.answer

    def turn(self) -> Any:
        raise EngineError("out of memory")


async def test_an_engine_that_is_well_again_has_no_fault() -> None:
    """Regression: it kept that of the moment, and its replica got no work, so no weights that would have cleared it."""
    engine: Any = Engine()
    nothing: Any = SimpleNamespace(version=0)
    role = RolloutRole(lambda _: engine, nothing, nothing)
    role._backend, role._loaded = engine, nothing
    with pytest.raises(FailedPrecondition, match="out of memory"):
        await anext(role._sample(engine, []))
    assert await role._probe() == "out of memory"
    assert role.fault() == "out of memory"
    engine.answer = ""
    assert await role._probe() == ""
    assert role.fault() == ""
