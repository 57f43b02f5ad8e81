"""Policies and value models made of any Hugging Face causal language model.

Parameters are float32 whatever the configuration's dtype: `bfloat16` means that forward and backward passes compute in
bfloat16 (autocast) over float32 master weights, as an update of 1e-6 would be rounded away in bfloat16.
Actor, reference and critic are all computed this way, so that an untrained actor equals its reference.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from shared.config import ModelConfig, TrainingConfig

from .device import autocast, pick_device
from .errors import ModelError
from .logprobs import CHUNK_ELEMENTS, TokenScores, Words, scatter, score_tokens
from .lora import add_lora, initial_value, is_adapter
from .scorer import Scorer
from .sequences import Sequences


class Policy(Scorer):
    """A causal language model that scores response tokens."""

    def __init__(self, lm: PreTrainedModel, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype)
        self.lm = lm
        self.words: Words | None = None

    def backbone(self) -> PreTrainedModel:
        return cast(PreTrainedModel, self.lm.base_model)

    def forward(self, sequences: Sequences, temperature: float, entropy_gradient: bool = False) -> TokenScores:
        """Log-probs and entropy of every response token, [B, T]."""
        chunk = max(1, CHUNK_ELEMENTS // head_of(self.lm).weight.shape[0])
        with autocast(sequences.input_ids_BS.device, self.autocast):
            hidden_ND, mine_BT = self.predicting_states(sequences)
            scores = score_tokens(
                hidden_ND,
                sequences.response_ids_BT,
                mine_BT,
                logits_of(self.lm),
                head_of(self.lm),
                temperature,
                chunk=chunk,
                words=self.words,
                entropy_gradient=entropy_gradient,
            )
        fields = scores.logprobs_BT, scores.entropy_BT, scores.sum_pi_squared_BT
        return TokenScores(*(self.of_all(values_BT) for values_BT in fields))

    @torch.no_grad()
    def logits_both_ways(self, ids_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [S, V] of the first row: the model's own, and those that `forward` scores with."""
        own_NV = self.lm(**self.given(ids_BS), use_cache=False).logits[0]
        hidden_ND = self.lm.base_model(**self.given(ids_BS), use_cache=False).last_hidden_state[0]
        return own_NV, logits_of(self.lm)(hidden_ND)


class ValueModel(Scorer):
    """A language model's body with one number per position: the value of the state before each response token.

    The head starts at zero, so the first values are 0 and need no seed.
    """

    def __init__(self, body: PreTrainedModel, width: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype)
        self.body = body
        self.head = nn.Linear(width, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def backbone(self) -> PreTrainedModel:
        return self.body

    def forward(self, sequences: Sequences) -> Tensor:
        """[B, T], 0 where padded, at least float32."""
        with autocast(sequences.input_ids_BS.device, self.autocast):
            hidden_ND, mine_BT = self.predicting_states(sequences)
        values_N = self.head(hidden_ND.to(self.head.weight.dtype)).squeeze(-1)
        return self.of_all(scatter(values_N, mine_BT))


def load_policy(
    config: ModelConfig, training: TrainingConfig | None = None, *, seed: int = 0, key: str = "model"
) -> Policy:
    """Loads `config.path`, a Hugging Face hub id or a directory.

    Args:
        training: how it is trained; None: not at all.
        seed: the run's, for adapters.
        key: the configuration section, for messages.

    Raises:
        ModelError: there is no such model, or it is not one that can be trained here.
    """
    lm = _load(config, training, seed, key)
    policy = Policy(lm, getattr(torch, config.dtype)).to(pick_device(config.device))
    check_head(policy, lm.device, key)
    return policy


def load_value_model(
    config: ModelConfig, training: TrainingConfig | None = None, *, seed: int = 0, key: str = "model"
) -> ValueModel:
    """The body of `config.path` with a value head. Raises as `load_policy`."""
    lm = _load(config, training, seed, key)
    width = head_of(lm).weight.shape[1]
    body = cast(PreTrainedModel, lm.base_model)
    return ValueModel(body, width, getattr(torch, config.dtype)).to(pick_device(config.device))


def load_tokenizer(config: ModelConfig, *, key: str = "model") -> PreTrainedTokenizerBase:
    """The model's tokenizer. Raises ModelError when it has none."""
    _check_directory(config.path, key)
    try:
        return AutoTokenizer.from_pretrained(config.path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(f"{key}.path: {config.path!r} has no usable tokenizer: {_first_line(error)}") from None


def head_of(lm: PreTrainedModel) -> nn.Linear:
    """The layer that makes logits."""
    head = lm.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(f"{lm.config.model_type} models have no linear output layer")
    return head


def is_tied(lm: PreTrainedModel) -> bool:
    """Whether embedding and head are one tensor."""
    head = lm.get_output_embeddings()
    return isinstance(head, nn.Linear) and head.weight is getattr(lm.get_input_embeddings(), "weight", None)


def logits_of(lm: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """The function from last hidden states [N, D] to logits [N, V], with what some families do after the head."""
    head, config = head_of(lm), lm.config
    cap = getattr(config, "final_logit_softcapping", None)
    scale = getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)

    def logits(hidden_ND: Tensor) -> Tensor:
        logits_NV = head(hidden_ND)
        logits_NV = logits_NV if scale == 1.0 else logits_NV * scale
        return logits_NV if cap is None else torch.tanh(logits_NV / cap) * cap

    return logits


def _load(config: ModelConfig, training: TrainingConfig | None, seed: int, key: str) -> PreTrainedModel:
    path = config.path
    with usable(path, key):
        settings = AutoConfig.from_pretrained(path, trust_remote_code=False)
        # Pickled weights are refused: only safetensors are read.
        lm = AutoModelForCausalLM.from_pretrained(
            path, config=settings, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
        )
    adopt(lm, training, key, path)
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if is_adapter(name):
                parameter.copy_(initial_value(name, parameter.shape, seed))
    return lm


@contextlib.contextmanager
def usable(path: str, key: str) -> Iterator[None]:
    """What a library says about a model that can't be loaded becomes a ModelError that names the key."""
    _check_directory(path, key)
    try:
        yield
    except (OSError, ValueError) as error:
        known = "directory holds no usable model" if Path(path).is_dir() else "is neither a directory nor a hub model"
        raise ModelError(f"{key}.path: {path!r} {known}: {_first_line(error)}") from None


def adopt(lm: PreTrainedModel, training: TrainingConfig | None, key: str, path: str) -> PreTrainedModel:
    """Makes a language model ready to be trained here.

    Args:
        key: with `path`, names it in messages.

    Raises:
        ModelError: it is not made of a body and a head, or adapters don't fit.
    """
    if not isinstance(lm.get_output_embeddings(), nn.Linear) or lm.base_model is lm:
        raise ModelError(f"{key}.path: {path!r} ({lm.config.model_type}) has no separate body and head")
    if training and training.lora:
        add_lora(lm, training.lora)
    _disable_dropout(lm)
    lm.eval()
    if training and training.gradient_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        lm.train()
    return lm


def _check_directory(path: str, key: str) -> None:
    """What can only be a directory must be one: a hub's answer to a path says nothing to its user."""
    if not Path(path).is_dir() and (Path(path).is_absolute() or path.startswith((".", "~")) or path.count("/") > 1):
        raise ModelError(f"{key}.path: there is no directory {path!r}")


def _disable_dropout(lm: nn.Module) -> None:
    """A policy with dropout is another policy at every pass: the ratio to itself would not be 1.

    Only gradient checkpointing puts a model in training mode, but then dropout would come with it.
    """
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def check_head(policy: Policy, device: torch.device, key: str) -> None:
    """Body and head apart must give the model's own logits; a family that does more in between is refused."""
    ids_BS = torch.arange(4, device=device)[None] % policy.lm.config.vocab_size
    own_NV, apart_NV = policy.logits_both_ways(ids_BS)
    if not torch.allclose(own_NV, apart_NV, rtol=1e-4, atol=1e-4):
        raise ModelError(
            f"{key}.path: {policy.lm.config.model_type} models change their logits in an unknown way; unsupported"
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
