"""What one test enters into process-wide tables is gone for the next; properties are not timed."""

import sys
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import HealthCheck, settings

# How long an example takes says nothing where several processes share a core.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def _registries_as_they_were() -> Iterator[None]:
    algo = sys.modules.get("shared.algo")
    if algo is None:
        yield
        return
    from shared.algo import advantages, policy_losses

    tables = [advantages.ADVANTAGES, policy_losses.POLICY_LOSSES]
    before = [(dict(table), dict(table.defaults)) for table in tables]
    grouped = set(advantages.GROUPED_ADVANTAGES)
    yield
    for table, (functions, defaults) in zip(tables, before, strict=True):
        table.clear()
        table.update(functions)
        table.defaults.clear()
        table.defaults.update(defaults)
    advantages.GROUPED_ADVANTAGES.intersection_update(grouped)


@pytest.fixture(autouse=True)
def _logs_as_at_the_start() -> Iterator[None]:
    yield
    structlog.reset_defaults()
