"""Whoever grades: one file per kind, imported when a run asks for it."""

from services.reward.backend import RewardBackend
from shared.config import RunConfig


def make_backend(config: RunConfig, grader_memory_bytes: int) -> RewardBackend:
    """The backend that `reward.backend` names, to be opened."""
    kind = config.reward.backend
    if kind == "function":
        from services.reward.backends.function import FunctionBackend

        return FunctionBackend(grader_memory_bytes)
    if kind == "model":
        from services.reward.backends.model import ModelBackend

        return ModelBackend()
    if kind == "grpc":
        from services.reward.backends.grpc import grpc_backend

        return grpc_backend()
    if kind == "agents":
        from services.reward.backends.agents import AgentsBackend

        return AgentsBackend()
    from services.reward.backends.http import http_backend

    return http_backend()
