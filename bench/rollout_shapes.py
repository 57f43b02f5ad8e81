"""Models of known shapes without weights, and prompts for them."""

import json
import random
from pathlib import Path
from typing import Any

SHAPES = {
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4},
    "smollm2": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "1b": {
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "13b": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40},
}  # fmt: skip
VOCABULARY = 32000


def write_shape(name: str, directory: Path, longest: int) -> None:
    """A configuration and a tokenizer of the words w0, w1, ...; no weights and no end-of-sequence token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    LlamaConfig(
        **SHAPES[name], vocab_size=VOCABULARY, max_position_embeddings=max(longest, 4096), dtype="bfloat16",
        bos_token_id=None, eos_token_id=None, architectures=["LlamaForCausalLM"],
    ).save_pretrained(directory)  # fmt: skip
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(directory)


def write_prompts(tokenizer: Any, count: int, length: int, path: Path) -> list[list[int]]:
    """Random prompts, all different, as a dataset; and their ids."""
    generator, prompts, rows = random.Random(0), [], []
    while len(rows) < count:
        ids = [generator.randrange(1000, min(len(tokenizer), VOCABULARY)) for _ in range(length)]
        text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        again = list(tokenizer(text)["input_ids"])
        prompts.append(again[:length])
        rows.append({"prompt": tokenizer.decode(prompts[-1]), "data_source": "random", "reward_model": {}})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [list(tokenizer(row["prompt"])["input_ids"]) for row in rows]
