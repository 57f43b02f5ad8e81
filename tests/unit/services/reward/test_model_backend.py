"""Hugging Face reward models: the same score as the model alone gives, through their own template."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from services.reward.backends.model import ModelBackend
from shared.rpc.errors import FailedPrecondition
from tests.fakes.reward import item, reward_config, write_tiny_reward_model
from tests.fakes.tiny import write_tiny_llama

TEXTS = ["a", "yes sir", "no", "", "one two three 4 5 6", "a" * 60]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tiny_reward_model(tmp_path_factory.mktemp("reward-model"))


async def scored(directory, texts, **changes):
    backend = ModelBackend()
    await backend.open(reward_config(backend="model", model={"path": str(directory), **changes}))
    return await backend.score("r", [item(text, sample=index) for index, text in enumerate(texts)])


async def test_scores_are_the_models_own_over_prompt_and_response(directory):
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    grades = await scored(directory, TEXTS)
    for text, grade in zip(TEXTS, grades, strict=True):
        ids = tokenizer(f"<u>what</s><a>{text}</s>", return_tensors="pt", add_special_tokens=False).input_ids
        with torch.no_grad():
            expected = model(input_ids=ids).logits[0, 0].item()
        assert grade.score == pytest.approx(expected, abs=1e-5)
    assert len({round(grade.score, 4) for grade in grades}) == len(TEXTS)


async def test_neighbours_change_nothing(directory):
    together = await scored(directory, TEXTS)
    alone = [(await scored(directory, [text]))[0] for text in TEXTS]
    assert [grade.score for grade in together] == pytest.approx([grade.score for grade in alone], abs=1e-5)


async def test_a_model_without_padding_scores_row_by_row(directory, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForSequenceClassification.from_pretrained(directory)
    tokenizer.pad_token = model.config.pad_token_id = None
    tokenizer.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    padded, bare = await scored(directory, TEXTS), await scored(tmp_path, TEXTS)
    assert [grade.score for grade in bare] == pytest.approx([grade.score for grade in padded], abs=1e-5)


async def test_a_model_without_a_template_gets_a_pair(directory, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    AutoModelForSequenceClassification.from_pretrained(directory).save_pretrained(tmp_path)
    first, second = await scored(tmp_path, ["a", "b"])
    assert first.valid
    assert first.score != second.score


async def test_a_text_that_does_not_fit_is_invalid(directory):
    fits, long = await scored(directory, ["a", "a" * 200])
    assert fits.valid
    assert (long.kind, long.error) == ("too_long", "212 tokens; reward.model holds 128")


async def test_bfloat16(directory):
    exact, rough = await scored(directory, TEXTS), await scored(directory, TEXTS, dtype="bfloat16")
    assert [grade.score for grade in rough] == pytest.approx([grade.score for grade in exact], abs=0.05)


async def test_what_is_no_reward_model_is_named(directory, tmp_path):
    write_tiny_llama(tmp_path / "policy")
    write_tiny_reward_model(tmp_path / "three", labels=3)
    for path, says in [
        (tmp_path / "policy", "no trained classification head"),
        (tmp_path / "three", "has 3 labels; a reward model has one"),
        (tmp_path / "missing", "cannot be loaded"),
    ]:
        with pytest.raises(FailedPrecondition, match=says) as caught:
            await scored(path, ["a"])
        assert f"reward.model.path={str(path)!r}" in str(caught.value)
    with pytest.raises(FailedPrecondition, match=r"reward\.model\.device.*not here"):
        await scored(directory, ["a"], device="cuda:77")
