"""Settings of the reward service."""

from typing import Annotated

from pydantic import Field

from shared.rpc.settings import ServiceSettings


class RewardSettings(ServiceSettings):
    """Grades responses: with a Python function, a reward model, or an external service."""

    role: str = "reward"
    grader_memory_bytes: Annotated[int, Field(ge=0)] = 8 * 1024**3
    """Address space of each process that runs a reward function; 0 is no limit (CUDA needs that)."""
    read_timeout: Annotated[float, Field(gt=0)] = 60.0
    """Seconds to fetch the rows of one batch."""
    reward_endpoint: str = ""
    """External grader for every run, whatever its configuration says: host:port (gRPC) or http(s) URL."""
