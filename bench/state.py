"""State access under a running job: latencies of the store's operations while six services play the demo's run.

    python bench/state.py

One client asks in turn, as a service does, and sleeps in between: what is measured is waiting, not throughput. First
all share all cores; then Redis and the client have the last core for themselves, and the roles compute on the others.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import psutil

from sextet.client import Client
from sextet.endpoint import read_state
from sextet.local import LocalServices
from shared.config_loading import load_config
from shared.state import StateStore, open_store

ROOT = Path(__file__).parent.parent
TRIES, PAUSE_SECONDS = 1500, 0.004
VALUE = b"x" * 512
P50_MS, P99_MS = 0.3, 2.0


def operations(store: StateStore) -> dict[str, Callable[[], Awaitable[object]]]:
    """What services ask of the store, by name."""
    return {
        "get": lambda: store.get("sextet:bench"),
        "put": lambda: store.put("sextet:bench", VALUE),
        "put with ttl": lambda: store.put("sextet:bench:ttl", VALUE, 6.0),
        "increment": lambda: store.increment("sextet:bench:count"),
        "append": lambda: store.append("sextet:bench:events", {"kind": "step", "metrics": "x" * 512}, 100),
        "lease": lambda: store.acquire("sextet:bench:lease", "bench", 6.0),
    }


async def measure(url: str) -> dict[str, list[float]]:
    """Milliseconds of every call, by operation."""
    store = open_store(url)
    try:
        found: dict[str, list[float]] = {}
        for name, operation in operations(store).items():
            await operation()
            times = found[name] = []
            for _ in range(TRIES):
                began = time.perf_counter()
                await operation()
                times.append(1000 * (time.perf_counter() - began))
                await asyncio.sleep(PAUSE_SECONDS)
        return found
    finally:
        await store.close()


def give_a_core() -> None:
    """The last core to Redis and this process, the others to the services."""
    *others, last = sorted(os.sched_getaffinity(0))
    for process in psutil.Process().children(recursive=True):
        cores = [last] if process.name() in ("valkey-server", "redis-server") else others
        for thread in process.threads():
            os.sched_setaffinity(thread.id, cores)
    os.sched_setaffinity(0, [last])


def playing(directory: Path) -> dict[str, dict[str, list[float]]]:
    """Measures while the demo's run is being played by services of this directory."""
    model = str(directory / "demo")
    subprocess.run([sys.executable, str(ROOT / "examples/demo/make_model.py"), model], check=True)
    changes = [
        f"model.path={model}",
        f"data.path={model}/data/train.parquet",
        "data.validation_path=null",
        f"reward.function={ROOT / 'examples/demo/reward.py'}:compute_score",
        "total_steps=100000",
        "checkpoint.export=false",
    ]
    state = directory / "state"
    with LocalServices(state, threads=1) as services, Client(services.endpoint) as client:
        run = client.create_run(load_config(ROOT / "examples/demo.yaml", changes))
        for event in client.watch(run.id):
            if event.kind == "step" and event.step == 2:
                break
        known = read_state(state)
        assert known is not None
        first = client.get_run(run.id).step
        found = {"all share all cores": asyncio.run(measure(known.redis_url))}
        give_a_core()
        found["Redis has a core"] = asyncio.run(measure(known.redis_url))
        steps = client.get_run(run.id).step - first
        client.cancel(run.id)
        print(f"{steps} steps were played meanwhile\n")
    return found


def report(title: str, found: Mapping[str, list[float]]) -> bool:
    """Prints a table; answers whether all calls together keep to the aim."""
    print(f"{title}\n\n| operation | p50 ms | p99 ms | max ms |\n| --- | ---: | ---: | ---: |")
    p50 = p99 = 0.0
    for name, times in [*found.items(), ("all", [one for each in found.values() for one in each])]:
        ordered = sorted(times)
        p50, p99 = ordered[len(ordered) // 2], ordered[int(0.99 * len(ordered))]
        print(f"| {name} | {p50:.3f} | {p99:.3f} | {ordered[-1]:.3f} |")
    kept = p50 < P50_MS and p99 < P99_MS
    print(f"\np50 < {P50_MS} ms and p99 < {P99_MS} ms: {'yes' if kept else 'no'}\n")
    return kept


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        found = playing(Path(directory))
    kept = [report(title, each) for title, each in found.items()]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
