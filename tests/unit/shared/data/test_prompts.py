"""Prompts through templates, and prompts that do not fit."""

import json

import pytest
import structlog.testing
from transformers import AutoTokenizer

from shared.data import prompts as module
from shared.data.datasets import DataError, Dataset
from shared.data.prompts import open_prompts, prompt_ids
from tests.fakes.tiny import write_tiny_llama


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(write_tiny_llama(tmp_path_factory.mktemp("tiny")))


def _dataset(tmp_path, prompts):
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return Dataset(str(path))


def _open(dataset, tokenizer, max_tokens=5, overlong="error"):
    return open_prompts(dataset, tokenizer, max_tokens=max_tokens, overlong=overlong, template_arguments={})


def test_messages_go_through_the_template_and_text_does_not(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['content'] }}>{% endfor %}{% if add_generation_prompt %}{{ end }}{% endif %}"
    )
    ids = prompt_ids(tokenizer, [{"role": "user", "content": "ab"}], {"end": "!"})
    assert tokenizer.convert_ids_to_tokens(ids) == ["<", "a", "b", ">", "!"]
    assert tokenizer.convert_ids_to_tokens(prompt_ids(tokenizer, "ab", {})) == ["a", "b"]


def test_messages_without_a_template(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        prompt_ids(tokenizer, [{"role": "user", "content": "ab"}], {})
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(DataError, match=r"template refuses a prompt: .*no system role"):
        prompt_ids(tokenizer, [{"role": "system", "content": "ab"}], {})


def test_prompts_that_do_not_fit_are_one_error(tmp_path, tokenizer):
    dataset = _dataset(tmp_path, ["abc", "", "abcdef", "a" * 5])
    with pytest.raises(DataError, match=r"row 1 is empty, row 2 has 6 tokens; .* 1 to 5 tokens: raise data.max_prompt"):
        _open(dataset, tokenizer)


def test_or_are_left_out_and_counted(tmp_path, tokenizer):
    with structlog.testing.capture_logs() as logs:
        prompts = _open(_dataset(tmp_path, ["", "abc", "abcdef", "ab"]), tokenizer, overlong="filter")
    assert [(entry["count"], entry["of"]) for entry in logs] == [(2, 4)]
    assert (len(prompts), list(prompts.rows), prompts.longest) == (2, [1, 3], 3)
    assert prompts.example(1).prompt == "ab"
    assert len(prompts.ids(0)) == 3
    with pytest.raises(IndexError):
        prompts.example(2)


def test_nothing_left(tmp_path, tokenizer):
    with pytest.raises(DataError, match="all 1 prompts are empty or longer than 5"):
        _open(_dataset(tmp_path, ["abcdef"]), tokenizer, overlong="filter")


def test_the_first_prompts_are_made_into_tokens_once(tmp_path, tokenizer, monkeypatch):
    texts = ["abc", "", "ba", "cab", "a"]
    monkeypatch.setattr(module, "MAX_KEPT_TOKENS", 5)
    prompts = _open(_dataset(tmp_path, texts), tokenizer, overlong="filter")
    made = []
    monkeypatch.setattr(module, "prompt_ids", lambda *args: made.append(args[1]) or prompt_ids(*args))
    usable = [text for text in texts if text]
    assert [prompts.ids(index) for index in range(4)] == [prompt_ids(tokenizer, text, {}) for text in usable]
    assert made == ["cab", "a"]
