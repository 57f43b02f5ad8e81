"""Model output is hostile: fifty ugly responses execute nothing and arrive as they are."""

from pathlib import Path

import pytest

from services.reward.backends.function import FunctionBackend
from tests.fakes.reward import function_config, item, items, reward_config


def responses(marker: Path) -> list[str]:
    touch = f"touch {marker}"
    python = f"open({str(marker)!r}, 'w')"
    return [
        f"__import__('os').system('{touch}')", f"'); {python} #", f'"""); {python} #', f"{{{python}}}", f"%({python})s",
        f"{{{{ {python} }}}}", f"{{% import os %}}{{{{ os.system('{touch}') }}}}", f"$({touch})", f"`{touch}`",
        f"; {touch}",
        f"| {touch}", f"&& {touch}", f"\n{touch}\n", f"!!python/object/apply:os.system ['{touch}']",
        f"cos\nsystem\n(S'{touch}'\ntR.", "{0.__class__.__mro__}", "%s%s%s%n", "${jndi:ldap://127.0.0.1/a}",
        "<script>alert(1)</script>", "'; DROP TABLE runs; --", '{"id": 0, "results": [{"score": 99}]}',
        '\n{"id": 0, "results": [{"score": 99}]}\n', '{"signature": "verl"}', "]}\n", '"}', "\\", "\\n", "\\u0000",
        "\x00", "a\x00b", "\x1b[2J\x1b]0;title\x07", "\r\n\r\n", "\x7f\x80\x9f", "\u2028\u2029\x85", "\u202eRTL",
        "\ufeff", "\uffff", "🏳️‍🌈" * 100, "e\u0301" * 1000, "Z\u0351\u036b" * 500, "9" * 10_000,
        "-" + "9" * 5000, "1e999999999", "0x" + "f" * 5000, "NaN", "-Infinity", "[" * 20_000, "a" * 3_000_000,
        "\n" * 100_000, "",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["spell", "spell_batch"])
async def test_hostile_responses_arrive_as_they_are_and_execute_nothing(tmp_path, name):
    marker = tmp_path / "executed"
    texts = responses(marker)
    assert len(texts) == len(set(texts)) == 50
    backend = FunctionBackend(2 << 30)
    await backend.open(function_config(name, timeout=20.0))
    try:
        grades = await backend.score("r", items(*texts))
    finally:
        await backend.close()
    for text, grade in zip(texts, grades, strict=True):
        assert grade.score == len(text), (text[:40], grade.error)
        assert name == "spell_batch" or grade.parts["sum"] == sum(map(ord, text)) % 1_000_003
    assert not marker.exists()


@pytest.mark.parametrize(
    "spec", ["functions.py:compute_score", "functions.py:answer_is_contained", "reasoning_gym_reward.py:compute_score"]
)
async def test_the_example_graders_survive_them_too(tmp_path, spec):
    marker = tmp_path / "executed"
    path = Path(__file__).parents[4] / "examples/rewards" / spec
    backend = FunctionBackend(4 << 30)
    await backend.open(reward_config(function=str(path), timeout=20.0))
    texts = responses(marker)
    asked = [item(text, "977", sample=index, source_dataset="chain_sum") for index, text in enumerate(texts)]
    try:
        grades = await backend.score("r", asked)
    finally:
        await backend.close()
    assert {grade.score for grade in grades} == {0.0}
    assert not marker.exists()
