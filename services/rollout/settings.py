"""Settings of the rollout service."""

from typing import Annotated

from pydantic import Field

from shared.rpc.settings import ServiceSettings


class RolloutSettings(ServiceSettings):
    """Samples responses to the prompts of a run's dataset."""

    role: str = "rollout"
    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads of one operator; 0: one per core. Samples are repeatable bit for bit with the same number."""
    fetch_timeout: Annotated[float, Field(gt=0)] = 300.0
    """Seconds to fetch a weight version."""
    http: str = ""
    """host:port of the OpenAI API (see facts "openai"); empty: the host of --bind and a free port."""
    spool_bytes: Annotated[int, Field(ge=0)] = 4 * 1024**3
    """Bytes of finished samples kept under data_dir, which a restarted rollout does not draw again."""
    probe_deadline: Annotated[float, Field(gt=0)] = 9.0
    """Seconds that the engine may go without a token or any progress; it is dead then, and started anew."""
