"""A tiny random llama on disk, with a tokenizer of single characters: real code paths in milliseconds."""

import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = ["<pad>", "<s>", "</s>", "<unk>", *string.ascii_lowercase, *string.digits, *" +-*/=().,:;!?'\"\n<>|_#$%"]


def write_tiny_llama(directory: Path, seed: int = 0, head_dim: int = 8, *, layers: int = 2, tied: bool = True) -> Path:
    """Vocabulary 64, width 32, four heads; weights from `seed` (vLLM: head_dim 32); tied: embedding and head."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=head_dim, max_position_embeddings=128, initializer_range=0.2,
        tie_word_embeddings=tied,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    fast.save_pretrained(directory)
    return directory
