"""Conversations as samples: what continues a turn and what does not, chains, and rows by hand."""

from functools import partial
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from services.rollout.backend import Sample, SamplingParams
from services.rollout.openai.answers import TextStream, version_spans
from services.rollout.openai.sessions import MAX_SESSIONS, Sessions, block_of, said_by
from shared.data.prompts import prompt_text
from shared.rpc.errors import Internal, NotFound, ResourceExhausted
from shared.userfile import load_file
from tests.fakes.chat import FORGETFUL, TEMPLATE, write_chat_llama

ROOT = Path(__file__).parents[4]
END = 2
PARAMS = SamplingParams(stop_token_ids=(END,), stop=("q",))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(write_chat_llama(tmp_path_factory.mktemp("sessions")))


def turn(session, tokenizer, messages, answer, *, template=TEMPLATE, finish="stop", version=0):
    """One turn as the endpoint plays it; the answer is text, ended by the end token when finish is stop."""
    tokenizer.chat_template = template
    text = prompt_text(tokenizer, messages, {})
    parent, prompt = session.prompt(tokenizer, text)
    ids = tokenizer(answer, add_special_tokens=False)["input_ids"] + ([END] if finish == "stop" else [])
    numbers = tuple(-0.5 - k for k in range(len(ids)))
    sample = Sample("u", 0, tuple(prompt), tuple(ids), numbers, (version,) * len(ids), finish)
    session.add(parent, messages, text, sample, said_by(tokenizer, sample, PARAMS))
    return [*messages, {"role": "assistant", "content": answer}]


def user(text):
    return {"role": "user", "content": text}


def test_a_two_turn_row_by_hand(tokenizer):
    session = Sessions("r0").start("run", uid="task", sample=3, data_source="d", ground_truth="5")
    messages = turn(session, tokenizer, [user("1+1")], "ab")
    turn(session, tokenizer, [*messages, {"role": "tool", "content": "x"}], "c", finish="length", version=4)
    session.reward = 0.5
    block = block_of([session], tokenizer)
    ids = {name: tokenizer(text, add_special_tokens=False)["input_ids"] for name, text in
           {"prompt": "<u>1+1<a>", "ab": "ab", "tool": "<t>x<a>", "c": "c"}.items()}  # fmt: skip
    assert [str(key) for key in block.rows] == ["task#3"]
    assert block["prompt_ids"].rows()[0].tolist() == ids["prompt"]
    assert block["response_ids"].rows()[0].tolist() == [*ids["ab"], END, *ids["tool"], *ids["c"]]
    assert block["response_mask"].rows()[0].tolist() == [1] * 3 + [0] * len(ids["tool"]) + [1]
    assert block["rollout_logprobs"].rows()[0].tolist() == [-0.5, -1.5, -2.5, *[0.0] * len(ids["tool"]), -0.5]
    assert block["versions"].rows()[0].tolist() == [0] * 3 + [4] * (len(ids["tool"]) + 1)
    assert (block["score"].data.tolist(), block["valid"].data.tolist()) == ([0.5], [1])
    assert (block["finish"].texts(), block["response"].texts()) == (["length"], ["ab<t>x<a>c"])


def test_an_unrewarded_session_is_not_valid(tokenizer):
    session = Sessions("r0").start("run")
    turn(session, tokenizer, [user("1")], "a")
    assert block_of([session], tokenizer)["valid"].data.tolist() == [0]


def test_an_answer_cut_by_its_length_is_gone_on_from(tokenizer):
    session = Sessions("r0").start("run")
    messages = turn(session, tokenizer, [user("1")], "ab", finish="length")
    turn(session, tokenizer, [*messages, user("2")], "c")
    [row] = block_of([session], tokenizer)["response_ids"].rows()
    # The end of the turn is the template's: the policy did not sample it.
    given = tokenizer("</s><u>2<a>", add_special_tokens=False)["input_ids"]
    assert row.tolist()[2 : 2 + len(given)] == given
    assert block_of([session], tokenizer)["response_mask"].rows()[0].tolist() == [1, 1, *[0] * len(given), 1, 1]


@pytest.mark.parametrize(
    ("edit", "template"),
    [
        (lambda said: said.replace("b", "z"), TEMPLATE),
        (lambda said: said[:-1], TEMPLATE),
        (lambda said: said, FORGETFUL),
    ],
)
def test_rewritten_history_begins_a_new_sample(tokenizer, edit, template):
    """An agent that edits, and a template that leaves out what stands before a # (thinking)."""
    session = Sessions("r0").start("run", uid="t")
    messages = turn(session, tokenizer, [user("1")], "ab#cb", template=template)
    messages[-1]["content"] = edit(messages[-1]["content"])
    turn(session, tokenizer, [*messages, user("2")], "d", template=template)
    block = block_of([session], tokenizer)
    assert [str(key) for key in block.rows] == ["t#0", "t|1#0"]
    assert [set(mask.tolist()) for mask in block["response_mask"].rows()] == [{1}, {1}]
    text = prompt_text(tokenizer, [*messages, user("2")], {})
    assert block["prompt_ids"].rows()[1].tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_the_same_ids_are_the_same_history_whatever_the_spaces():
    """The demo's tokenizer drops spaces, so that the template's text of an answer is not the answer's text."""
    tokenizer = load_file(ROOT / "examples/demo/make_model.py", "demo_").make_tokenizer()
    session, again = Sessions("r0").start("run", uid="t"), [user("Reverse 1 2")]
    play = partial(turn, session, tokenizer, template=tokenizer.chat_template, finish="length")
    play(again, "2 1 <|end|>")
    play([*again, {"role": "assistant", "content": "2 1"}, *again], "1 2")
    block = block_of([session], tokenizer)
    said, given = tokenizer("2 1 <|end|>")["input_ids"], tokenizer("<|user|> Reverse 1 2 <|end|> <|assistant|>")
    given = given["input_ids"]
    assert [str(key) for key in block.rows] == ["t#0"]
    assert block["response_ids"].rows()[0].tolist() == [*said, *given, *tokenizer("1 2")["input_ids"]]
    assert block["response_mask"].rows()[0].tolist() == [1] * 3 + [0] * len(given) + [1] * 2


def test_special_tokens_in_an_answer_stay_in_its_ids(tokenizer):
    """The agent never saw them, and history without them is still the history of these ids (law 5)."""
    session = Sessions("r0").start("run")
    messages = turn(session, tokenizer, [user("1")], "a<s>b")
    messages[-1]["content"] = "ab"
    turn(session, tokenizer, [*messages, user("2")], "c")
    [row] = block_of([session], tokenizer)["response_ids"].rows()
    assert 1 in row.tolist()[:4]


def test_a_branch_takes_no_token_twice(tokenizer):
    session = Sessions("r0").start("run", uid="t")
    messages = turn(session, tokenizer, [user("1")], "a")
    turn(session, tokenizer, [*messages, user("2")], "b")
    turn(session, tokenizer, [*messages, user("3")], "c")
    block = block_of([session], tokenizer)
    assert [str(key) for key in block.rows] == ["t#0", "t|1#0"]
    sampled = [ids[mask == 1].tolist() for ids, mask in
               zip(block["response_ids"].rows(), block["response_mask"].rows(), strict=True)]  # fmt: skip
    said = {name: tokenizer(name, add_special_tokens=False)["input_ids"] for name in "abc"}
    assert sampled == [[*said["a"], END, *said["b"], END], [*said["c"], END]]
    second = session.turns[2].sample.prompt_ids
    assert list(second[: len(session.turns[0].sample.prompt_ids) + 2])[-2:] == [*said["a"], END]


def test_prompts_that_do_not_fit_are_an_error_not_a_sample(tokenizer):
    session = Sessions("r0").start("run")
    messages = turn(session, tokenizer, [user("1")], "a")
    turn(session, tokenizer, [*messages, user("2")], "b")
    wrong = session.turns[1].sample
    object.__setattr__(wrong, "prompt_ids", (9, *wrong.prompt_ids[1:]))
    with pytest.raises(Internal, match="does not begin with the turn before"):
        block_of([session], tokenizer)


def test_sessions_are_bounded_and_belong_to_a_run(monkeypatch):
    sessions = Sessions("r0")
    made = [sessions.start("run") for _ in range(MAX_SESSIONS)]
    assert made[0].id.startswith("r0.")
    with pytest.raises(ResourceExhausted, match="4096 sessions are in use"):
        sessions.start("run")
    made[7].used -= 4000
    sessions.start("run")
    with pytest.raises(NotFound):
        sessions.get(made[7].id, "run")
    with pytest.raises(NotFound):
        sessions.get(made[0].id, "another")
    assert sessions.get(made[0].id, "run") is made[0]


def test_a_stream_never_takes_back_what_it_said(tokenizer):
    """Text that may be the beginning of a stop string is held back until it is not."""
    params = SamplingParams(stop=("bcd",))
    ids = tokenizer("abcabcd", add_special_tokens=False)["input_ids"]
    stream, said = TextStream(tokenizer, params), []
    for count in range(1, len(ids) + 1):
        done = count == len(ids)
        sample = Sample("u", 0, (4,), tuple(ids[:count]), (0.0,) * count, (0,) * count, "stop" if done else "length")
        text, tail = stream.push(sample, done)
        said.append(text)
        assert list(tail.response_ids) == ids[count - 1 : count]
    assert said == ["a", "", "", "bca", "", "", ""]
    assert version_spans([1, 1, 2, 1]) == [[1, 2], [2, 1], [1, 1]]
