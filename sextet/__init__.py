"""Sextet: reinforcement learning for language models as six services. What is here is imported when it is asked for."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sextet.client import AsyncClient, Client
    from sextet.quickstart import DatasetBuilder, PPOTrainer, TrainingError, TrainingResult, get_ppo_config
    from shared.config import ConfigError, RunConfig
    from shared.config_loading import load_config

__all__ = [
    "AsyncClient",
    "Client",
    "ConfigError",
    "DatasetBuilder",
    "PPOTrainer",
    "RunConfig",
    "TrainingError",
    "TrainingResult",
    "get_ppo_config",
    "load_config",
]

_HOME = {
    "AsyncClient": "sextet.client",
    "Client": "sextet.client",
    "ConfigError": "shared.config",
    "RunConfig": "shared.config",
    "load_config": "shared.config_loading",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'sextet' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOME.get(name, "sextet.quickstart")), name)
