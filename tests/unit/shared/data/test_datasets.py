"""Datasets in verl's columns, and what is said about bad ones."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shared.data.datasets import DataError, Dataset, load_rows

ROWS = [
    {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"{i} + 1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        "extra_info": {"index": i, "split": "train"},
        "difficulty": i,
    }
    for i in range(3)
]


def _write(path, rows):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("name", ["d.parquet", "d.jsonl"])
def test_verls_columns(tmp_path, name):
    rows = load_rows(_write(tmp_path / name, ROWS))
    assert len(rows) == 3
    assert rows[1].prompt == [{"role": "user", "content": "1 + 1?"}]
    assert json.loads(rows[1].prompt_json) == rows[1].prompt
    assert (rows[1].data_source, rows[1].ground_truth) == ("sums", "2")
    assert json.loads(rows[1].extra_info) == {"index": 1, "split": "train", "ability": "math", "difficulty": 1}


def test_only_a_prompt_is_needed_and_it_may_be_text(tmp_path):
    [row] = load_rows(_write(tmp_path / "d.jsonl", [{"question": "Why?"}]), prompt_key="question")
    assert (row.prompt, row.data_source, row.ground_truth, row.extra_info) == ("Why?", "", "", "{}")
    assert row.prompt_json == '"Why?"'


def test_ground_truth_that_is_not_text_is_json(tmp_path):
    truths = ["4", 4, [1, {"a": None}], None]
    rows = [{"prompt": "x", "reward_model": {"ground_truth": truth}} for truth in truths]
    found = load_rows(_write(tmp_path / "d.jsonl", rows))
    assert [row.ground_truth for row in found] == ["4", "4", '[1, {"a": null}]', "null"]


def test_messages_of_parquet_lose_the_fields_they_did_not_have(tmp_path):
    messages = [{"role": "user", "content": "a"}, {"role": "tool", "content": "b", "name": "t"}]
    [row] = load_rows(_write(tmp_path / "d.parquet", [{"prompt": messages}]))
    assert row.prompt == messages


def test_rows_at_random_and_the_digest(tmp_path):
    first, second = Dataset(_write(tmp_path / "a.jsonl", ROWS)), Dataset(_write(tmp_path / "b.jsonl", ROWS[:2]))
    assert first[2].ground_truth == "3"
    assert first.digest == Dataset(str(tmp_path / "a.jsonl")).digest != second.digest
    with pytest.raises(IndexError, match="has no row 3: it has 3 rows"):
        first[3]


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("d.jsonl", [{"promt": "x", "data_source": "s"}], "has promt, data_source: did you mean data.prompt_key=promt"),
        ("d.parquet", [{"zzz": "x"}], r"no column 'prompt'; it has zzz: set data.prompt_key"),
        ("d.jsonl", [], "has no rows"),
        ("d.jsonl", [{"prompt": 7}], r"row 0: the prompt is neither text nor a list of \{role, content\} \(got '7'\)"),
        ("d.jsonl", [{"prompt": "a"}, {"other": 1}], "row 1: no 'prompt'; it has other"),
        ("d.jsonl", [{"prompt": "a", "reward_model": "rule"}], "row 0: reward_model is not an object"),
        ("d.csv", [{"prompt": "a"}], "must end with .parquet, .jsonl, .json"),
    ],
)  # fmt: skip
def test_bad_datasets(tmp_path, name, rows, message):
    with pytest.raises(DataError, match=message):
        load_rows(_write(tmp_path / name, rows))


def test_files_that_are_not_what_they_are_called(tmp_path):
    (tmp_path / "d.parquet").write_text("no")
    (tmp_path / "d.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    with pytest.raises(DataError, match="cannot be read"):
        load_rows(str(tmp_path / "d.parquet"))
    with pytest.raises(DataError, match="row 1: not JSON"):
        load_rows(str(tmp_path / "d.jsonl"))
    with pytest.raises(DataError, match="does not exist"):
        load_rows(str(tmp_path / "missing.jsonl"))
    with pytest.raises(DataError, match="is a directory"):
        load_rows(str(tmp_path))
