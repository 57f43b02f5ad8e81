"""Stop strings while a row grows, and the text of a finished one, with a byte-level tokenizer."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from services.rollout.backend import Sample, SamplingParams
from services.rollout.text import StopWatch, decode, response_text


@pytest.fixture(scope="module")
def tokenizer():
    """One token per byte, and two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", additional_special_tokens=["<x>"])


def _ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _ends(tokenizer, params, ids):
    """How many tokens until the row ends; None: it does not."""
    watch = StopWatch(tokenizer, params)
    return next((count for count, token in enumerate(ids, 1) if watch.push(token)), None)


def _finished(ids, finish="stop"):
    return Sample("u", 0, (1,), tuple(ids), (0.0,) * len(ids), (0,) * len(ids), finish)


@pytest.mark.parametrize(
    ("text", "stop", "before"),
    [
        ("answer: 4\n\nnext", "\n\n", "answer: 4"),
        ("Müller sagt: genug.", "genug", "Müller sagt: "),
        ("日本語です。終わり。", "終わ", "日本語です。"),
        ("ok 🏳 done", "🏳", "ok "),
        ("aaab", "ab", "aa"),
        ("STOP", "STOP", ""),
        ("no such thing", "zzz", None),
    ],
)
def test_a_stop_string_over_several_tokens(tokenizer, text, stop, before):
    ids, params = _ids(tokenizer, text), SamplingParams(stop=("never", stop))
    count = _ends(tokenizer, params, ids)
    if before is None:
        assert count is None
        return
    assert count == len((before + stop).encode())
    assert response_text(tokenizer, _finished(ids[:count]), params) == before


def test_found_at_once_though_a_character_is_only_begun(tokenizer):
    # A token may bring the end of a stop string and the first byte of the next character.
    ids = _ids(tokenizer, "abSTé")
    assert _ends(tokenizer, SamplingParams(stop=("ST",)), ids) == 4


def test_special_tokens_are_no_text(tokenizer):
    special = tokenizer.convert_tokens_to_ids("<x>")
    ids = [*_ids(tokenizer, "S"), special, *_ids(tokenizer, "T!")]
    params = SamplingParams(stop=("ST",))
    assert _ends(tokenizer, params, ids) == 3
    assert response_text(tokenizer, _finished(ids[:3]), params) == ""
    assert decode(tokenizer, [*ids, tokenizer.eos_token_id]) == "ST!"


def test_not_before_min_tokens_and_the_cut_is_at_the_one_that_counted(tokenizer):
    ids = _ids(tokenizer, "x. y. z.")
    params = SamplingParams(stop=(". ",), min_tokens=4)
    assert _ends(tokenizer, params, ids) == 6
    assert response_text(tokenizer, _finished(ids[:6]), params) == "x. y"


def test_stop_tokens(tokenizer):
    end = tokenizer.eos_token_id
    ids = [*_ids(tokenizer, "a."), end]
    params = SamplingParams(stop=("!",), stop_token_ids=(end,))
    assert _ends(tokenizer, params, ids) == 3
    assert response_text(tokenizer, _finished(ids), params) == "a."


def test_a_truncated_response_is_not_cut(tokenizer):
    ids = _ids(tokenizer, "a. b")
    assert response_text(tokenizer, _finished(ids, "length"), SamplingParams(stop=(". ",), min_tokens=9)) == "a. b"


def test_a_resumed_row_knows_what_it_said(tokenizer):
    ids, params = _ids(tokenizer, "so END."), SamplingParams(stop=("END",))
    watch = StopWatch(tokenizer, params, ids[:5])
    assert [watch.push(token) for token in ids[5:]] == [True, False]
