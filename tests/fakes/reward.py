"""Items, configurations and a tiny reward model for tests of the reward role."""

import json
from pathlib import Path
from typing import Any

from services.reward.backend import Item
from shared.config import RunConfig
from shared.config_loading import load_config

GRADERS = Path(__file__).with_name("graders.py")
CHAT = json.dumps([{"role": "user", "content": "what"}])


def item(
    response: str = "a", truth: str = "a", *, sample: int = 0, prompt: str = CHAT, source: str = "d", **extra: Any
) -> Item:
    return Item("1:0:0", sample, source, prompt, response, truth, json.dumps(extra))


def items(*responses: str) -> list[Item]:
    return [item(response, sample=index) for index, response in enumerate(responses)]


def reward_config(**reward: Any) -> RunConfig:
    tree = {
        "model": {"path": "none"},
        "data": {"path": "none"},
        "total_steps": 1,
        "reward": {"timeout": 10.0, **reward},
    }
    return load_config(tree)


def function_config(name: str, **reward: Any) -> RunConfig:
    return reward_config(function=f"{GRADERS}:{name}", **reward)


def write_tiny_reward_model(directory: Path, labels: int = 1) -> Path:
    """A tiny llama with a classification head and a chat template that tells the roles apart."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    from tests.fakes.tiny import write_tiny_llama

    write_tiny_llama(directory)
    config = LlamaConfig.from_pretrained(directory, num_labels=labels)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        LlamaForSequenceClassification(config).save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = (
        "{% for message in messages %}<{{ message['role'][0] }}>{{ message['content'] }}</s>{% endfor %}"
    )
    tokenizer.save_pretrained(directory)
    return directory
