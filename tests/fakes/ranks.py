"""Runs a function on several ranks (processes with a gloo group), for tests: `python -m tests.fakes.ranks`."""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run_ranks(function: str, size: int, job: dict[str, Any], timeout: float = 200) -> list[Any]:
    """Calls `module:function(group, job)` on each rank; the JSON values they return, in order of rank."""
    with tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, "-m", "tests.fakes.ranks", function, directory, json.dumps(job), str(size)]
        ranks = [
            subprocess.Popen([*command, str(rank)], env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True)
            for rank in range(size)
        ]
        try:
            errors = [rank.communicate(timeout=timeout)[1] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(rank.returncode for rank in ranks):
            raise AssertionError("\n".join(f"rank {i}: {error[-3000:]}" for i, error in enumerate(errors)))
        return [json.loads((Path(directory) / f"{rank}.json").read_text()) for rank in range(size)]


def main() -> None:
    import torch
    import torch.distributed as dist

    from shared.training.group import Group

    function, directory, job, size, rank = sys.argv[1:]
    torch.set_num_threads(1)
    store = dist.FileStore(  # pyright: ignore[reportPrivateImportUsage]
        str(Path(directory) / "store"), int(size)
    )
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(size))
    module, _, name = function.partition(":")
    group = Group(int(rank), int(size), dist.group.WORLD)
    result = getattr(importlib.import_module(module), name)(group, json.loads(job))
    (Path(directory) / f"{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    # The function may have left a thread that waits in a group for as long as the process lives.
    os._exit(0)


if __name__ == "__main__":
    main()
