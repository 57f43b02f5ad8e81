"""Makes the demo's model and data on the spot: `python examples/demo/make_model.py DIRECTORY [--seed N]`.

The task is to write three digits backwards. The model is a two-layer Llama with 0.2 M parameters. Its supervised
warm-up is a careless school: of the answers it sees, 30 % are right, the others are the digits copied, the digits
rotated, or any digits. So it answers in the right form and is right about one time in three, by its own choice of what
to do. Nothing but the reward tells it which of the four is wanted: that is what PPO has to teach.

DIRECTORY then holds the model as `from_pretrained` reads it, and data/train.parquet and data/validation.parquet with
different digits, in verl's columns.
"""

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

Digits = tuple[int, ...]

PAD, END, USER, ASSISTANT, UNKNOWN = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|unknown|>"
WORDS = ["Reverse", *"0123456789"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LENGTH, VALIDATION = 3, 100
RIGHT = 0.3
WARMUP_STEPS, BATCH = 350, 64


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A word is a token; the chat template marks turns."""
    special = [PAD, END, USER, ASSISTANT, UNKNOWN]
    vocabulary = {word: index for index, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNKNOWN, chat_template=TEMPLATE
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The model with random weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def messages(digits: Digits) -> list[dict[str, str]]:
    """The prompt as a chat."""
    return [{"role": "user", "content": f"Reverse {spaced(digits)}"}]


def spaced(digits: Digits) -> str:
    return " ".join(str(digit) for digit in digits)


def careless_answer(digits: Digits, draw: random.Random) -> Digits:
    """What the warm-up shows: right with probability RIGHT, else one of three ways to be wrong."""
    if draw.random() < RIGHT:
        return digits[::-1]
    return draw.choice([digits, (*digits[1:], digits[0]), tuple(draw.randrange(10) for _ in digits)])


def warm_up(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[Digits], draw: random.Random
) -> None:
    """A few seconds of supervised training on careless answers."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(WARMUP_STEPS):
        chosen = draw.choices(prompts, k=BATCH)
        heads = [tokenizer.apply_chat_template(messages(d), add_generation_prompt=True)["input_ids"] for d in chosen]
        tails = [tokenizer(f"{spaced(careless_answer(d, draw))} {END}")["input_ids"] for d in chosen]
        ids_BT = torch.tensor([head + tail for head, tail in zip(heads, tails, strict=True)])
        labels_BT = ids_BT.clone()
        labels_BT[:, : len(heads[0])] = -100
        loss = model(input_ids=ids_BT, labels=labels_BT).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def rows(prompts: list[Digits]) -> Iterator[dict[str, object]]:
    """The data in verl's columns."""
    for index, digits in enumerate(prompts):
        yield {
            "data_source": "reverse_digits",
            "prompt": messages(digits),
            "ability": "digits",
            "reward_model": {"style": "rule", "ground_truth": spaced(digits[::-1])},
            "extra_info": {"index": index},
        }


def make(directory: Path, seed: int) -> None:
    """Writes model, tokenizer and data."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    everything = [tuple(int(digit) for digit in f"{number:0{LENGTH}}") for number in range(10**LENGTH)]
    draw.shuffle(everything)
    validation, training = everything[:VALIDATION], everything[VALIDATION:]
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    warm_up(model, tokenizer, training, draw)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    # save_pretrained makes it private; a container runs as another user.
    (directory / "model.safetensors").chmod(0o644)
    (directory / "data").mkdir(exist_ok=True)
    for name, prompts in (("train", training), ("validation", validation)):
        pq.write_table(pa.Table.from_pylist(list(rows(prompts))), directory / "data" / f"{name}.parquet")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    # The model is too small to share its work between threads.
    torch.set_num_threads(1)
    disable_progress_bar()
    make(given.directory, given.seed)


if __name__ == "__main__":
    main()
