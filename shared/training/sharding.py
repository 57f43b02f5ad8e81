"""Models too large for one rank: built without memory, cut over the mesh, then each rank reads what it holds.

Tensor parallelism follows the model's own `tp_plan`; what the plan does not name is the same on all tp ranks. Over
that, `fully_shard` (FSDP2) cuts every parameter over the shards. Parameters are float32; `model.dtype: bfloat16` means
that they are gathered, and computed with, in bfloat16.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar, cast

import structlog
import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from shared.config import ModelConfig, TrainingConfig

from .context import refused
from .errors import ModelError
from .logprobs import Words
from .lora import initial_value, is_adapter
from .models import Policy, ValueModel, adopt, check_head, head_of, is_tied, usable
from .models import load_policy as load_whole_policy
from .models import load_value_model as load_whole_value_model
from .parallel import COPIES, ONE, SHARDS, TP, Parallel
from .regions import local, region_of
from .scorer import Scorer, pack
from .shards import on_all
from .stages import Elsewhere, cut

log = structlog.get_logger()
Model = TypeVar("Model", Policy, ValueModel)
Fill = Callable[[str, Tensor], None]
"""Puts values into a parameter, given its name in the language model's state dict."""
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
}
"""Hugging Face's names of what tensor parallelism can do to a linear layer or an embedding."""


def load_policy(
    config: ModelConfig,
    training: TrainingConfig | None = None,
    parallel: Parallel = ONE,
    *,
    seed: int = 0,
    key: str = "model",
) -> Policy:
    """As models.load_policy; where there are several ranks, this rank holds its part only. All ranks together."""
    if parallel.group.size == 1:
        policy = load_whole_policy(config, training, seed=seed, key=key)
    else:

        def part() -> Policy:
            lm = _build(config, training, parallel, key)
            policy = Policy(lm, getattr(torch, config.dtype))
            distribute(policy, lm, parallel, reader(config.path, key, seed), key)
            if parallel.is_last:
                # Its parameters have to be gathered for this pass, too.
                register_fsdp_forward_method(policy, Policy.logits_both_ways.__name__)
                check_head(policy, device_of(policy, parallel), key)
            return policy

        policy = _on_every_stage(part, parallel)
    if training:
        lay_out(policy, training, parallel, key)
    return policy


def load_value_model(
    config: ModelConfig,
    training: TrainingConfig | None = None,
    parallel: Parallel = ONE,
    *,
    seed: int = 0,
    key: str = "model",
) -> ValueModel:
    """As models.load_value_model; where there are several ranks, this rank holds its part only. All ranks together."""
    if parallel.group.size == 1:
        model = load_whole_value_model(config, training, seed=seed, key=key)
    else:

        def part() -> ValueModel:
            lm = _build(config, training, parallel, key)
            with _parameters_on_meta():
                body = cast(PreTrainedModel, lm.base_model)
                model = ValueModel(body, head_of(lm).weight.shape[1], getattr(torch, config.dtype))
            return distribute(model, lm, parallel, reader(config.path, key, seed), key)

        model = _on_every_stage(part, parallel)
    if training:
        lay_out(model, training, parallel, key)
    return model


def _on_every_stage(part: Callable[[], Model], parallel: Parallel) -> Model:
    """Makes this rank's part; what only one stage refuses, all of them do."""
    if parallel.pp == 1:
        return part()
    # All ranks make it together, whatever one of them refuses afterwards.
    _ = parallel.mesh
    return on_all(parallel.group, part, ModelError)


def lay_out(model: Policy | ValueModel, training: TrainingConfig, parallel: Parallel, key: str) -> None:
    """Has a model compute rows as its configuration says: without padding if it can, tokens shared by ranks.

    Raises:
        ModelError: rows have to be packed for parallel.cp and are not, or their heads can't be divided.
    """
    model.in_8_bits = training.eight_bit_activations
    if training.packing:
        if isinstance(model, FSDPModule):
            register_fsdp_forward_method(model, Scorer.states_of.__name__)
        pack(model, device_of(model, parallel))
        if parallel.pp > 1 and len(set(parallel.group.exchange(model.padded))) > 1:
            stages = f"parallel.pp={parallel.pp}"
            raise ModelError(f"{key}: with {stages} only some stages can do packed rows: set packing to false")
        if model.padded:
            log.info("rows are padded", model=key, why=model.padded)
    if parallel.cp == 1:
        return
    if model.padded:
        raise ModelError(f"{key}: parallel.cp={parallel.cp} needs rows without padding, but {model.padded}")
    config: Any = model.backbone().config
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    if why := refused(heads, key_heads, parallel.tp, parallel.cp):
        raise ModelError(f"{key}: {why}")
    model.context = parallel.context


def build(settings: PretrainedConfig) -> PreTrainedModel:
    """A language model whose parameters have shapes but no memory; buffers are as they are computed."""
    with _parameters_on_meta():
        return AutoModelForCausalLM.from_config(settings, dtype=torch.float32, trust_remote_code=False)


def distribute(model: Model, lm: PreTrainedModel, parallel: Parallel, fill: Fill, key: str) -> Model:
    """Cuts a model without memory over stages and the mesh, and fills this rank's part.

    Args:
        lm: the language model that `model` is made of.

    Raises:
        ModelError: it can't be cut into stages, or has no tp_plan that fits.
    """
    if parallel.pp > 1:
        cut(lm, parallel, key, tied=isinstance(model, Policy))
        model.embeds = parallel.stage == 0
    if isinstance(model, ValueModel) and not parallel.is_last:
        del model.head
    if parallel.tp > 1:
        plan, tied = tp_plan(lm, parallel.tp, key), is_tied(lm)
        embedding, head = lm.get_input_embeddings(), cast(nn.Linear, lm.get_output_embeddings())
        parallelize_module(lm, parallel.mesh[TP], plan)
        if tied and isinstance(embedding.weight, nn.Parameter):
            head.weight = embedding.weight
        if isinstance(model, Policy) and head in (lm.get_submodule(name) for name in plan):
            model.words = Words(parallel.mesh[TP].get_group(), parallel.tp_rank * -(-len(head.weight) // parallel.tp))
    _shard(model, lm, model.dtype, parallel)
    if not parallel.is_last:
        register_fsdp_forward_method(model, Scorer.hand_on.__name__)
    # Parameters are gathered in the computing dtype: autocast would cast them a second time.
    model.autocast = torch.float32
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    home = torch.device("cpu") if parallel.config.offload else device
    # Parameters have no memory yet; buffers have, and are needed where the model computes.
    model._apply(lambda t: torch.empty_like(t, device=home) if t.device.type == "meta" else t.to(device))
    own = {"head.weight", "head.bias"} if isinstance(model, ValueModel) else set()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in own:
                local(parameter).zero_()
            else:
                fill(_state_name(model, lm, name), parameter)
    return model


def reader(path: str, key: str, seed: int) -> Fill:
    """Fills parameters from the safetensors files of a model, reading only what this rank holds; adapters from `seed`.

    Raises:
        ModelError: on use, when a tensor is missing or has another shape.
    """
    with usable(path, key):
        directory = Path(path)
        if not directory.is_dir():
            directory = Path(snapshot_download(path, allow_patterns=["*.safetensors"]))
    files: dict[str, Path] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            files |= dict.fromkeys(opened.keys(), file)
    if not files:
        raise ModelError(f"{key}.path: {path!r} holds no safetensors file")

    def fill(name: str, parameter: Tensor) -> None:
        if is_adapter(name):
            whole = initial_value(name, parameter.shape, seed)
            local(parameter).copy_(whole[region_of(parameter).slices])
            return
        if name not in files:
            raise ModelError(f"{key}.path: {path!r} has no tensor {name!r}: it can't be loaded in shards")
        region = region_of(parameter)
        with safe_open(files[name], "pt") as opened:
            stored = opened.get_slice(name)
            if tuple(stored.get_shape()) != region.shape:
                raise ModelError(f"{key}.path: {name!r} is {stored.get_shape()}, not {list(region.shape)}")
            if not region.empty:
                local(parameter).copy_(stored[region.slices])

    return fill


def _build(config: ModelConfig, training: TrainingConfig | None, parallel: Parallel, key: str) -> PreTrainedModel:
    if training and training.lora and parallel.tp > 1:
        raise ModelError(f"{key}: adapters (lora) can't be cut by parallel.tp={parallel.tp}: set it to 1")
    with usable(config.path, key):
        settings = AutoConfig.from_pretrained(config.path, trust_remote_code=False)
        lm = build(settings)
    return adopt(lm, training, key, config.path)


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters made inside have no memory; buffers, which no file holds, are made as always."""
    plain = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        # One that is there already is being tied and has to stay the same object.
        if param is not None and param.device.type != "meta":
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        plain(self, name, param)

    nn.Module.register_parameter = register
    try:
        yield
    finally:
        nn.Module.register_parameter = plain


def tp_plan(lm: PreTrainedModel, tp: int, key: str) -> dict[str, ParallelStyle]:
    """Styles by module name. Raises ModelError when the model can't be cut that way."""
    plan: dict[str, str] = dict(getattr(lm, "_tp_plan", None) or {})
    if not plan:
        raise ModelError(f"{key}: {lm.config.model_type} models have no tp_plan: set parallel.tp to 1")
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(lm.config, name, None)) and heads % tp:
            raise ModelError(f"{key}: {name}={heads} can't be divided by parallel.tp={tp}")
    found = {name: _style(name, plan) for name, _ in lm.named_modules()}
    styles = {}
    for name, module in lm.named_modules():
        if (wanted := found[name]) is None or isinstance(module, Elsewhere):
            continue
        # A head that is the embedding is cut as it is, or not at all.
        is_head = module is lm.get_output_embeddings()
        if is_head and is_tied(lm) and "embedding_rowwise" not in found.values():
            continue
        if wanted not in STYLES or not isinstance(module, nn.Linear | nn.Embedding):
            raise ModelError(f"{key}: {name} is to be cut by {wanted!r}, which is not known here: set parallel.tp to 1")
        if isinstance(module, nn.Linear) and not is_head:
            _refuse_uneven(f"{key}: {name}", module, wanted, tp)
        # Logits stay where they are made: who scores puts together what is needed of them.
        styles[name] = STYLES["colwise" if is_head else wanted]()
    return styles


def _refuse_uneven(what: str, layer: nn.Linear, style: str, tp: int) -> None:
    """Ranks take it that what they hand to the next layer has the same width everywhere."""
    side = "in_features" if style == "rowwise" else "out_features"
    if (width := getattr(layer, side)) % tp:
        raise ModelError(f"{what} has {side}={width}, which can't be divided by parallel.tp={tp}")


def _style(name: str, plan: dict[str, str]) -> str | None:
    return next((style for pattern, style in plan.items() if fnmatchcase(name, pattern)), None)


def _shard(model: nn.Module, lm: PreTrainedModel, dtype: torch.dtype, parallel: Parallel) -> None:
    mesh = parallel.mesh[COPIES, SHARDS] if parallel.copies > 1 else parallel.mesh[SHARDS]
    compute = None if dtype == torch.float32 else dtype
    reduce = getattr(torch, parallel.config.reduce_dtype)
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if parallel.config.offload else OffloadPolicy()
    shared: dict[str, Any] = {"mesh": mesh, "offload_policy": offload}
    mixed = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    for layer in _layers(lm):
        fully_shard(layer, mp_policy=mixed, **shared)
    if isinstance(model, ValueModel) and parallel.is_last:
        # One number per token: bfloat16 would round it to three digits.
        fully_shard(model.head, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce), **shared)
    # By default the outermost module stays gathered after a forward pass, and its parameters would not be its shards.
    fully_shard(model, mp_policy=mixed, reshard_after_forward=True, **shared)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Micro-batches give shares of the loss: gradients add up, where the default would take their mean.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _layers(lm: PreTrainedModel) -> Sequence[nn.Module]:
    """What is gathered at a time: the blocks that the model's authors say belong together."""
    names = set(lm._no_split_modules or ())
    return [module for module in lm.base_model.modules() if type(module).__name__ in names]


def _state_name(model: nn.Module, lm: PreTrainedModel, name: str) -> str:
    """A parameter's name in the language model's state dict."""
    if isinstance(model, Policy):
        return name.removeprefix("lm.")
    return f"{lm.base_model_prefix}.{name.removeprefix('body.')}"


def device_of(model: nn.Module, parallel: Parallel) -> torch.device:
    """Where a model computes; its parameters may live elsewhere."""
    if parallel.config.offload and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return next(model.parameters()).device


def synchronise_on(model: nn.Module, last: bool, parallel: Parallel) -> None:
    """Says whether the coming backward pass is the last before the optimizer step.

    Before it, gradients are not summed over copies, and with parallel.accumulate=whole not over shards either.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if parallel.config.accumulate == "whole":
                module.set_requires_gradient_sync(last, recurse=False)
            elif parallel.copies > 1:
                module.set_requires_all_reduce(last, recurse=False)
