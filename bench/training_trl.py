"""The actor's update of bench/training.py done by TRL's GRPOTrainer, as `trainer.train()` does it.

The same: rows, weights, float32 master weights with autocast to the run's dtype, micro-batch, activation checkpointing,
AdamW (fused on a GPU), clipping, clipped policy loss with given old log-probs and given advantages per token, averaged
over the batch's tokens, entropy as a metric, no KL term, so no reference. TRL scores through its fused LM head, too.

Timed is an optimizer step from the trainer's on_step_begin to its on_step_end: shuffling and splitting of the batch,
forward and backward passes, its metrics, clipping and the optimizer. Not timed: generation, rewards, advantages, old
log-probs (all of them given, on the device already), logging, saving. TRL runs as its user gets it: torch's attention
(padded rows where they are --uneven) and no deterministic algorithms, which the roles always use; without optional
kernels (Liger, flash-attn, kernels of the hub) and torch.compile, which Sextet does not use either.
"""

import tempfile
import time
from typing import Any

import pyarrow
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from shared.batch import columns
from shared.batch.block import Block
from shared.config import RunConfig
from shared.training.sequences import collate, per_token


class Clock(TrainerCallback):
    """Seconds and peak memory of each optimizer step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self.began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.steps.append({"updating": time.perf_counter() - self.began})
        if torch.cuda.is_available():
            self.steps[-1]["memory_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30


class GivenRows(GRPOTrainer):
    """A trainer whose every batch is the same, with nothing generated."""

    given: dict[str, Tensor]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Tensor]:
        return dict(self.given)


def measure(lm: PreTrainedModel, config: RunConfig, block: Block, updates: int) -> list[dict[str, float]]:
    """Seconds, gradient norm and on a GPU the peak memory of optimizer steps, each on all rows of `block`.

    Args:
        block: rows that the micro-batch size divides, with prompts of equal length.
    """
    clock, deterministic = Clock(), torch.are_deterministic_algorithms_enabled()
    with tempfile.TemporaryDirectory() as directory:
        trainer = GivenRows(
            model=lm,
            reward_funcs=no_rewards,
            args=arguments(config, len(block), updates, directory),
            # Beside a pyarrow before 26 the fingerprint of a table can't be computed.
            train_dataset=Dataset(pyarrow.table({"prompt": ["given"] * updates}), fingerprint="given"),
            processing_class=no_words(),
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.given = batch(block, trainer.args.device)
        torch.use_deterministic_algorithms(False)
        try:
            trainer.train()
        finally:
            torch.use_deterministic_algorithms(deterministic, warn_only=True)
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return [{**step, "grad_norm": norm} for step, norm in zip(clock.steps, norms, strict=True)]


def batch(block: Block, device: torch.device) -> dict[str, Tensor]:
    """The block's rows as the trainer's own generation would give them."""
    sequences, mask_BT = collate(block, device), per_token(block, columns.RESPONSE_MASK, device)
    prompt = int(block[columns.PROMPT_IDS].lengths[0])
    return {
        "prompt_ids": sequences.input_ids_BS[:, :prompt],
        "prompt_mask": sequences.attention_mask_BS[:, :prompt].long(),
        "completion_ids": sequences.response_ids_BT,
        "completion_mask": mask_BT.long(),
        "advantages": per_token(block, columns.ADVANTAGES, device),
        "old_per_token_logps": per_token(block, columns.OLD_LOGPROBS, device),
        "num_items_in_batch": mask_BT.sum(),
    }


def arguments(config: RunConfig, rows: int, updates: int, directory: str) -> GRPOConfig:
    """The trainer's, for what the run's configuration says of the actor."""
    actor, optimizer, loss = config.actor, config.actor.optimizer, config.actor.loss
    return GRPOConfig(
        output_dir=directory,
        max_steps=updates,
        per_device_train_batch_size=actor.micro_batch_size,
        gradient_accumulation_steps=rows // actor.micro_batch_size,
        # One prompt a batch.
        num_generations=rows,
        max_completion_length=config.rollout.max_tokens,
        temperature=config.rollout.temperature,
        # The mean over a batch's tokens.
        loss_type="dapo",
        beta=0.0,
        epsilon=loss.clip_ratio_low,
        epsilon_high=loss.clip_ratio_high,
        bf16=config.model.dtype == "bfloat16",
        gradient_checkpointing=actor.gradient_checkpointing,
        learning_rate=optimizer.lr,
        lr_scheduler_type="constant",
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.clip_grad,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def no_rewards(**_: Any) -> list[float]:
    """The trainer wants a reward, although advantages are given."""
    raise AssertionError("rows that are given are not graded")


def no_words() -> PreTrainedTokenizerFast:
    """The trainer wants a tokenizer, although nothing is tokenized."""
    vocabulary = Tokenizer(WordLevel({"<end>": 0}, unk_token="<end>"))
    return PreTrainedTokenizerFast(tokenizer_object=vocabulary, eos_token="<end>", pad_token="<end>")
