"""New weights into a vLLM rollout service: publish, prepare (wire, digests) and commit (what generation waits for).

    python bench/weights_vllm.py --shapes tiny --rows 4 --response 8    # on a CPU: gloo
    python bench/weights_vllm.py --shapes 1b 7b 13b                     # two GPUs: actor's weights on 0, vLLM on 1
    python bench/weights_vllm.py --shapes 1b --same                     # one GPU for both: mapped memory

A process holds a Llama with random weights and publishes versions of it as the actor service does; another is the
rollout service with vLLM. Every version is prepared and committed by gRPC as a controller does it: with an idle engine,
and prepared while it generates. Figures are medians of --tries; the first, with its group, is told by itself.
"""

import argparse
import asyncio
import base64
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.rollout import Child, Client, run_serve, say, wait_for_go, write_job
from bench.rollout_shapes import SHAPES

COLUMNS = ("shape", "GB", "first prepare", "publish", "prepare", "GB/s", "prepare, generating", "commit", "tokens/s",
           "tokens/s, preparing")  # fmt: skip


def run_actor(job: dict[str, Any]) -> None:
    """Weights of the shape; for every line that it reads it changes them a little, publishes them and says the ref."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from shared.config import WeightsConfig
    from shared.gen.sextet.v1 import weights_pb2_grpc
    from shared.rpc.run import RoleParts
    from shared.weights.gather import Gatherings
    from shared.weights.grpc import GrpcPublisher, WeightsServicer
    from tests.fakes.role import FakeBackend, fake_role

    wait_for_go()
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        config = AutoConfig.from_pretrained(job["model"], trust_remote_code=False)
        lm = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, job["dtype"]), trust_remote_code=False)
    publisher, gatherings = GrpcPublisher(keep=1 if job["same"] else 2), Gatherings()

    def parts(context: Any) -> RoleParts:
        services = [(weights_pb2_grpc.add_WeightsServiceServicer_to_server, WeightsServicer(publisher, gatherings))]
        bound = partial(setattr, publisher, "endpoint")
        return RoleParts(FakeBackend(), services, [], on_bound=bound, on_stopped=gatherings.close)

    def publish(version: int) -> dict[str, Any]:
        with torch.no_grad():
            lm.model.norm.weight.add_(0.01)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started = time.perf_counter()
        ref = publisher.publish(version, lm.state_dict(), run="bench", options=WeightsConfig())
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "ref": base64.b64encode(ref.SerializeToString()).decode()}

    async def serve() -> None:
        async with fake_role(parts):
            say("ready")
            version = 0
            while await asyncio.to_thread(sys.stdin.readline):
                version += 1
                say(await asyncio.to_thread(publish, version))

    asyncio.run(serve())


class Rollout(Client):
    """The controller's part, with weights."""

    async def prepare(self, ref: Any) -> float:
        """Seconds."""
        from shared.gen.sextet.v1 import rollout_pb2, weights_pb2

        self._step += 1
        gathering = weights_pb2.WeightsGathering(id=f"g{self._step}", members=["rollout-0"]) if ref.offers else None
        operation = self._operation("rollout.prepare_weights")
        request = rollout_pb2.PrepareWeightsRequest(operation=operation, weights=ref, gathering=gathering)
        return await self._timed("PrepareWeights", request)

    async def commit(self, ref: Any) -> float:
        """Seconds."""
        from shared.gen.sextet.v1 import rollout_pb2

        self._step += 1
        operation = self._operation("rollout.commit_weights")
        request = rollout_pb2.CommitWeightsRequest(operation=operation, version=ref.version, digest=ref.digest)
        return await self._timed("CommitWeights", request)

    async def speed(self) -> float:
        """Tokens per second."""
        tokens, seconds = await self.make(self._job["rows"][0], self._job["response"], {"replicas": 1})
        return tokens / seconds

    async def _timed(self, method: str, request: Any) -> float:
        from shared.gen.sextet.v1 import rollout_pb2_grpc

        started = time.perf_counter()
        await self._all(lambda channel: getattr(rollout_pb2_grpc.RolloutServiceStub(channel), method), [request])
        return time.perf_counter() - started


async def measure(job: dict[str, Any], actor: Child, rollout: Child) -> dict[str, Any]:
    """A row of the table."""
    from shared.gen.sextet.v1 import weights_pb2

    client, found = Rollout(job, "vllm", [rollout]), {name: [] for name in COLUMNS[3:]}

    async def published() -> Any:
        actor.tell("publish")
        said = await asyncio.to_thread(actor.said)
        if said is None:
            raise RuntimeError("the actor's process has ended: what it wrote says why")
        found["publish"].append(said["seconds"])
        return weights_pb2.WeightsRef.FromString(base64.b64decode(said["ref"]))

    try:
        actor.go()
        _, ready = await asyncio.gather(client.start(), asyncio.to_thread(actor.said))
        if ready is None:
            raise RuntimeError("the actor does not start: what it wrote says why")
        ref = await published()
        first = await client.prepare(ref)
        await client.commit(ref)
        await client.speed()
        for _ in range(job["tries"]):
            ref = await published()
            found["prepare"].append(await client.prepare(ref))
            found["commit"].append(await client.commit(ref))
            found["tokens/s"].append(await client.speed())
            ref = await published()
            beside, speed = await asyncio.gather(client.prepare(ref), client.speed())
            found["prepare, generating"].append(beside)
            found["tokens/s, preparing"].append(speed)
            found["commit"].append(await client.commit(ref))
    finally:
        await client.close()
    middle = {name: statistics.median(values) for name, values in found.items() if values}
    about = {"shape": job["shape"], "GB": ref.bytes / 1e9, "first prepare": first}
    return {**about, **middle, "GB/s": ref.bytes / 1e9 / middle["prepare"]}


def run_shape(options: argparse.Namespace, shape: str, show: Callable[[dict[str, Any]], None]) -> None:
    """Its processes are ended afterwards, whatever happens."""
    with tempfile.TemporaryDirectory() as work:
        own = {"shape": shape, "model": None, "rows": [options.rows], "hf_rows": [], "out": None}
        asked = argparse.Namespace(**{**vars(options), **own})
        path = write_job(asked, Path(work))
        children = [Child(path, "actor", 0, __file__), Child(path, "serve", 0 if options.same else 1, __file__)]
        try:
            show(asyncio.run(asyncio.wait_for(measure(json.loads(path.read_text()), *children), options.seconds)))
        except Exception as error:  # noqa: BLE001 - the other shapes are still to be measured
            print(f"{shape}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            for child in children:
                child.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["tiny"], choices=SHAPES)
    for name, default in (("--rows", 64), ("--prompt", 64), ("--response", 128), ("--tries", 3), ("--seconds", 400)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--same", action="store_true", help="both on the first GPU")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--engine-args", default={}, type=json.loads)
    parser.add_argument("--out", type=Path, help="where rows are written as JSON")
    parser.add_argument("--job", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        path, what = options.job
        return {"actor": run_actor, "serve": run_serve}[what](json.loads(Path(path).read_text()))
    rows: list[dict[str, Any]] = []

    def show(row: dict[str, Any]) -> None:
        rows.append(row)
        print("| " + " | ".join(f"{row[n]:.4g}" if n != "shape" else row[n] for n in COLUMNS) + " |", flush=True)
        if options.out:
            options.out.write_text(json.dumps(rows, indent=1) + "\n")

    print("| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS), flush=True)
    for shape in options.shapes:
        run_shape(options, shape, show)
    return None


if __name__ == "__main__":
    main()
