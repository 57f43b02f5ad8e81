"""A tiny llama that chats: its tokenizer decodes to the same text, its template marks roles and the ends of turns."""

from pathlib import Path

from tokenizers import decoders
from transformers import PreTrainedTokenizerFast

from tests.fakes.tiny import write_tiny_llama

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'][0] }}>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
"""A turn of the assistant ends with the end-of-sequence token, as it was sampled."""
FORGETFUL = TEMPLATE.replace("{{ message['content'] }}", "{{ message['content'].split('#')[-1] }}")
"""What stands before a # (thinking) is left out of history."""


def write_chat_llama(directory: Path, template: str = TEMPLATE, seed: int = 0) -> Path:
    """Vocabulary 64, width 32, 128 positions."""
    write_tiny_llama(directory, seed)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return directory
