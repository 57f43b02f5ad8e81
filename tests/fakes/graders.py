"""Well- and ill-behaved reward functions for the tests; `response` says what to do."""

import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def echo(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> dict[str, Any]:
    """1.0 for the ground truth; `length` is a part, the others are not."""
    right = float(solution_str == ground_truth)
    return {"score": right, "length": len(solution_str), "note": "text", "bad": float("nan")}


async def asynchronous(solution_str: str, ground_truth: str, bonus: float = 0.0) -> float:
    return float(solution_str == ground_truth) + bonus


def misbehave(solution_str: str, **_: Any) -> Any:
    return _act(solution_str)


def misbehave_in_batches(prompts: list[Any], completions: list[Any], **columns: Any) -> Any:
    texts = [completion if isinstance(completion, str) else completion[0]["content"] for completion in completions]
    return [_act(text) for text in texts]


def too_few(completions: list[Any], **_: Any) -> list[float]:
    dropped = any("drop" in completion[0]["content"] for completion in completions)
    return [1.0] * (len(completions) - dropped)


def columns_seen(
    prompts: list[Any], completions: list[Any], ground_truth: list[str], level: list[int], **rest: list[Any]
) -> list[float]:
    chat = isinstance(prompts[0], list)
    wanted = [{"role": "assistant", "content": "a"}] if chat else "a"
    assert all(completion == wanted for completion in completions), completions
    assert set(rest) == {"data_source", "extra_info", "other"}, rest
    return [float(value) for value in level]


def odd(something: int) -> float:
    return 0.0


def lacking(solution_str: str, threshold: float) -> float:
    return float(len(solution_str) > threshold)


def flaky(solution_str: str) -> float:
    """Raises for what starts with "bad"."""
    if solution_str.startswith("bad"):
        raise ValueError(solution_str)
    return 1.0


def process_id(solution_str: str) -> float:
    if solution_str == "die":
        os._exit(1)
    return float(os.getpid())


def limits(solution_str: str) -> dict[str, float]:
    found = {"no_new_privileges": float("NoNewPrivs:\t1" in Path("/proc/self/status").read_text())}
    for name in ("CPU", "AS", "CORE", "NOFILE"):
        found[name], found[f"{name}_hard"] = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
    return {"score": 0.0, **found}


def leave_a_child(solution_str: str, path: str) -> float:
    """Writes the ids of itself and of a child of its own, then holds the interpreter lock."""
    child = subprocess.Popen(["sleep", "600"])
    with open(path, "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    re.match(r"(a+)+$", "a" * 40 + "b")
    return 0.0


def spell(solution_str: str) -> dict[str, float]:
    """What arrived, as numbers: length and a checksum of its code points."""
    return {"score": float(len(solution_str)), "sum": float(sum(map(ord, solution_str)) % 1_000_003)}


def secrets(solution_str: str) -> float:
    return float(any(name.startswith("SEXTET_") for name in os.environ))


def _act(text: str) -> Any:
    answers = {
        "nan": float("nan"), "inf": float("inf"), "none": None, "text": "1.0", "list": [1.0], "huge": 10**400,
        "beyond_float32": 1e39, "numpy": np.float32(0.5), "bool": True, "dict": {"reward": 1.0},
        "none_in_dict": {"score": None},
    }  # fmt: skip
    if text in answers:
        return answers[text]
    if text == "raise":
        raise RuntimeError("no grade for you\nsecond line")
    if text == "sys_exit":
        sys.exit(3)
    if text == "exit":
        os._exit(7)
    if text == "segfault":
        os.kill(os.getpid(), 11)
    if text == "hang":
        time.sleep(1000)
    if text == "spin":
        return sum(1 for _ in iter(int, 1))
    if text == "print":
        print('{"id": 0, "results": [{"score": 99}]}\n' * 50_000, flush=True)
        os.write(1, b'{"id": 1, "results": [{"score": 99}]}\n')
        sys.stderr.write("x" * 1_000_000)
    if text == "stdin":
        return float(len(sys.stdin.read()))
    if text == "fork":
        os.fork()  # both copies return; only the grader may answer
    if text == "orphan_hang":
        subprocess.Popen(["sleep", "977"])
        time.sleep(1000)
    if text == "escape_and_die":
        subprocess.Popen(["sleep", "5"], start_new_session=True, stdout=1, stderr=2)
        os._exit(9)
    if text == "memory":
        return float(len(bytearray(8 << 30)))
    if text == "recurse":
        return _act(text)
    return 1.0


def spell_batch(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(completion[0]["content"])) for completion in completions]


def contract(solution_str: str, ground_truth: str) -> dict[str, float]:
    """What grader_servers.exact does."""
    if solution_str.startswith("bad"):
        raise ValueError("no grade")
    return {"score": float(solution_str == ground_truth), "length": float(len(solution_str))}


def contract_batch(completions: list[Any], ground_truth: list[str]) -> list[float]:
    texts = [completion[0]["content"] for completion in completions]
    return [contract(text, truth)["score"] for text, truth in zip(texts, ground_truth, strict=True)]
