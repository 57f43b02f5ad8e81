"""Makes chain_sum prompts of reasoning-gym: `python examples/make_chain_sum.py data/chain_sum.parquet --rows 1024`.

Needs `pip install -e '.[reasoning]'` and a C compiler. Rows are in verl's columns. The system message asks for the
answer's form; it also takes the place of the default one of SmolLM2's chat template, which is longer than the problem.
Graded by examples/rewards/reasoning_gym_reward.py.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import reasoning_gym

TASK = "chain_sum"
INSTRUCTION = "Answer with the number only."


def problems(rows: int, seed: int, terms: int, digits: int) -> Iterator[dict[str, Any]]:
    """Rows of sums and differences.

    Args:
        terms: at most, at least 2.
        digits: of each term at most.
    """
    tasks = reasoning_gym.create_dataset(
        TASK, min_terms=2, max_terms=terms, min_digits=1, max_digits=digits, size=rows, seed=seed
    )
    for task in tasks:
        yield {
            "data_source": f"reasoning_gym/{TASK}",
            "prompt": [
                {"role": "system", "content": INSTRUCTION},
                {"role": "user", "content": task["question"]},
            ],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": task["answer"]},
            "extra_info": {"metadata": task["metadata"]},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="a .parquet file")
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--terms", type=int, default=2, help="terms of a sum at most (default: 2)")
    parser.add_argument("--digits", type=int, default=1, help="digits of a term at most (default: 1)")
    given = parser.parse_args()
    if given.rows < 1 or given.terms < 2 or given.digits < 1:
        parser.error("--rows and --digits must be at least 1, --terms at least 2")
    if given.output.suffix != ".parquet":
        parser.error(f"{given.output}: name a .parquet file")
    given.output.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(list(problems(given.rows, given.seed, given.terms, given.digits)))
    pq.write_table(table, given.output)


if __name__ == "__main__":
    main()
