"""Services of this machine, where no process has to be started for the test."""

from sextet import local


async def test_a_notebook_can_start_services() -> None:
    """Its event loop runs already: asyncio.run refused, and with it every training without `sextet up`."""
    assert local._controllers("memory://notebook") == []
