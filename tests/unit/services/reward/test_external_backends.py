"""External graders that fail, lie, hang or are not there."""

import asyncio
import contextlib
import socket
import time

import grpc
import pytest

from services.reward.backend import valid_grade
from services.reward.backends import make_backend
from services.reward.external import ExternalBackend, chunks
from shared.gen.sextet.v1 import reward_pb2
from shared.rpc.errors import FailedPrecondition, Unavailable
from tests.fakes.grader_servers import Answer, exact, grpc_grader, http_grader
from tests.fakes.ports import kept_port
from tests.fakes.reward import item, items, reward_config

START = {"grpc": grpc_grader, "http": http_grader}
BOTH = pytest.mark.parametrize("kind", ["grpc", "http"])
UNAVAILABLE = {"grpc": grpc.StatusCode.UNAVAILABLE, "http": 503}


@contextlib.asynccontextmanager
async def opened(kind, script, **reward):
    async with START[kind](script) as endpoint:
        config = reward_config(backend=kind, endpoint=endpoint, **reward)
        backend = make_backend(config, 0)
        await backend.open(config)
        try:
            yield backend
        finally:
            await backend.close()


@BOTH
async def test_an_endpoint_that_comes_back_is_asked_again(kind):
    calls = []

    def script(pairs):
        calls.append(len(pairs))
        if len(calls) in (2, 3):
            raise Answer(UNAVAILABLE[kind])
        return exact(pairs)

    async with opened(kind, script) as backend:
        grades = await backend.score("r", items("a", "b"))
    assert [grade.score for grade in grades] == [1.0, 0.0]
    assert calls == [0, 2, 2, 2]


@BOTH
async def test_an_endpoint_that_stays_away_is_unavailable_after_bounded_attempts(kind):
    calls = []

    def script(pairs):
        calls.append(len(pairs))
        if pairs:
            raise Answer(UNAVAILABLE[kind])
        return []

    async with opened(kind, script) as backend:
        with pytest.raises(Unavailable, match=r"reward\.endpoint=.* is not available") as caught:
            await backend.score("r", items("a", "b"))
    assert caught.value.details["key"] == "reward.endpoint"
    assert calls == [0, 2, 2, 2, 2]


@BOTH
async def test_nobody_listening_is_unavailable_and_soon(kind):
    with kept_port() as port:
        address = f"127.0.0.1:{port}"
        config = reward_config(backend=kind, endpoint=address if kind == "grpc" else f"http://{address}")
        start = time.monotonic()
        with pytest.raises(Unavailable, match=r"reward\.endpoint=.*" + address):
            await make_backend(config, 0).open(config)
    assert time.monotonic() - start < 20


@BOTH
async def test_a_black_hole_is_unavailable_within_its_timeouts(kind):
    with socket.socket() as mute:  # connections are accepted by the kernel, and nothing is ever said
        mute.bind(("127.0.0.1", 0))
        mute.listen(16)
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        config = reward_config(backend=kind, endpoint=address if kind == "grpc" else f"http://{address}", timeout=0.5)
        start = time.monotonic()
        with pytest.raises(Unavailable, match=r"reward\.endpoint"):
            await make_backend(config, 0).open(config)
    assert time.monotonic() - start < 20


@BOTH
async def test_a_hanging_item_costs_only_itself(kind):
    def script(pairs):
        if any(response == "slow" for response, _ in pairs):
            raise Answer(UNAVAILABLE[kind], seconds=30)
        return exact(pairs)

    async with opened(kind, script, timeout=1.5) as backend:
        grades = await backend.score("r", items("a", "slow", "a"))
    assert [grade.kind for grade in grades] == ["", "timeout", ""]
    assert "reward.timeout=1.5 s" in grades[1].error


@BOTH
async def test_an_endpoint_that_froze_is_unavailable_without_a_timeout_per_item(kind):
    frozen = False

    def script(pairs):
        if frozen:
            raise Answer(UNAVAILABLE[kind], seconds=30)
        return exact(pairs)

    async with opened(kind, script, timeout=1.5) as backend:
        frozen, start = True, time.monotonic()
        with pytest.raises(Unavailable):
            await backend.score("r", items(*["a"] * 60))
    assert time.monotonic() - start < 20


@BOTH
@pytest.mark.parametrize("wrong", [-1, 1])
async def test_a_wrong_number_of_results_costs_the_item_behind_it(kind, wrong):
    def script(pairs):
        results = exact(pairs)
        lie = any(response == "liar" for response, _ in pairs)
        return [*results, *results][: len(results) + wrong] if lie else results

    async with opened(kind, script) as backend:
        grades = await backend.score("r", items("a", "liar", "b"))
    assert [grade.kind for grade in grades] == ["", "shape", ""]
    assert grades[1].error == f"{1 + wrong} results for 1 items"


@BOTH
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e39])
async def test_scores_that_are_no_finite_float32_are_invalid(kind, value):
    async with opened(kind, lambda pairs: [value if response == "x" else 0.5 for response, _ in pairs]) as backend:
        bad, good = await backend.score("r", items("x", "y"))
    assert (bad.kind, good.score) == ("score", 0.5)


@pytest.mark.parametrize("result", [None, 1, [], "text", {}, {"score": "1"}, {"score": None}, {"score": [1]}])
async def test_http_results_of_another_shape_are_invalid(result):
    def script(pairs):
        raise Answer(200, {"results": [result if response == "x" else {"score": 1} for response, _ in pairs]})

    async with opened("http", script) as backend:
        bad, good = await backend.score("r", items("x", "y"))
    assert bad.kind in ("score", "shape", "rejected")
    assert good.score == 1.0


@pytest.mark.parametrize(
    "body", [b"<html>", b"", b"[]", b'{"results": 1}', b"[" * 100_000, b'{"results": [' + b"9" * 5000 + b"]}"]
)
async def test_http_answers_that_are_no_answer_cost_their_items(body):
    def script(pairs):
        if any(response == "x" for response, _ in pairs):
            raise Answer(200, body)
        return exact(pairs)

    async with opened("http", script) as backend:
        bad, good = await backend.score("r", items("x", "a"))
    assert (bad.kind, good.score) == ("shape", 1.0)


async def test_http_answers_are_bounded():
    def script(pairs):
        if pairs:
            raise Answer(200, b" " * (20 << 20))
        return []

    async with opened("http", script, timeout=5.0) as backend:
        [grade] = await backend.score("r", items("a"))
    assert grade.error == "an answer of more than 16 MiB"


async def test_http_500_is_tried_again_and_then_costs_its_item():
    calls = []

    def script(pairs):
        calls.append(len(pairs))
        if any(response == "x" for response, _ in pairs):
            raise Answer(500, b"traceback")
        return exact(pairs)

    async with opened("http", script) as backend:
        bad, good = await backend.score("r", items("x", "a"))
    assert (bad.kind, bad.error, good.score) == ("rejected", "HTTP status 500: traceback", 1.0)
    assert calls == [0, 2, 2, 2, 2, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("http", Answer(404, b"no such page")),
        ("http", Answer(401, b"who are you")),
        ("http", Answer(301, b"")),
        ("http", Answer(200, b"<html>hello</html>")),
        ("grpc", Answer(grpc.StatusCode.UNIMPLEMENTED)),
        ("grpc", Answer(grpc.StatusCode.UNAUTHENTICATED)),
        ("grpc", Answer(body=reward_pb2.ScoreResponse(results=[reward_pb2.ScoreResult(score=1)]))),
    ],
)
async def test_what_is_no_grader_is_found_at_configure(kind, answer):
    def script(pairs):
        raise answer

    with pytest.raises(FailedPrecondition, match=r"reward\.endpoint"):
        async with opened(kind, script):
            pass


@pytest.mark.parametrize(
    ("kind", "endpoint"),
    [
        ("http", "127.0.0.1:80"),
        ("http", "http://"),
        ("http", "http://[::1"),
        ("grpc", "http://host:1"),
        ("grpc", "host"),
    ],
)
async def test_an_endpoint_of_the_wrong_form_is_named(kind, endpoint):
    config = reward_config(backend=kind, endpoint=endpoint)
    with pytest.raises((FailedPrecondition, Unavailable), match=r"reward\.endpoint=") as caught:
        await make_backend(config, 0).open(config)
    assert repr(endpoint) in str(caught.value)


async def test_requests_in_flight_are_as_many_as_workers():
    running, most = 0, 0

    class Transport:
        async def send(self, run, asked):
            nonlocal running, most
            running, most = running + 1, max(most, running + 1)
            await asyncio.sleep(0.05)
            running -= 1
            return [valid_grade(1.0) for _ in asked]

        async def close(self):
            pass

    backend = ExternalBackend(lambda *_: Transport())
    await backend.open(reward_config(backend="grpc", endpoint="x:1", workers=3))
    assert len(await backend.score("r", items(*["a"] * 1000))) == 1000
    assert most == 3


def test_chunks_are_bounded_in_items_and_bytes():
    sizes = [1] * 130 + [1 << 20] * 5 + [5 << 20] + [1]
    asked = [item("é" * (size // 2), sample=index) for index, size in enumerate(sizes)]
    parts = list(chunks(asked))
    assert [one for part in parts for one in part] == asked
    assert all(len(part) <= 64 for part in parts)
    assert all(len(part) == 1 or sum(one.size for one in part) <= 2 << 20 for part in parts)
    assert list(chunks([])) == []
