"""The weight channel against a broadcast of the same bytes, in the same processes and the same run.

    python bench/weights.py --shapes tiny                    # anywhere: gloo between processes
    python bench/weights.py --shapes 1b 7b 13b               # two GPUs: NCCL, and mapped memory on the same GPU

Four processes: two senders and two receivers, one of each on either GPU. Rows are printed as they are measured, and
written to --out (default: $OUT, else bench/results). Needs torch, numpy, xxhash and protobuf; weights are random.
"""

import argparse
import base64
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch

from bench.weights_child import HOST, Process, packed, serve
from bench.weights_shapes import SHAPES, shapes_of, tensor_parallel
from shared.gen.sextet.v1 import weights_pb2
from shared.weights import codec
from shared.weights.agreement import digests_of, piece_message, read_agreement
from shared.weights.group import open_store
from shared.weights.part import WIDTHS
from shared.weights.schedule import CPU_BUCKET, default_bucket

COLUMNS = ("shape", "what", "GB", "seconds", "GB/s", "of broadcast", "note")


class Bench:
    """Scenarios over the four processes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.rows, self.began = options, [], time.monotonic()
        gpus = [-1] * 4 if options.device == "cpu" else [0, 1, 0, 1] if torch.cuda.device_count() > 1 else [0, 0, 0]
        self.two, self.on_gpu = len(gpus) == 4, options.device != "cpu"
        self.wire = "NCCL" if self.on_gpu else "gloo"
        self.processes = [Process(__file__, gpu) for gpu in gpus]
        self.places = [process.tell("place") for process in self.processes]
        self.places = [place() for place in self.places]
        self.stores: list[Any] = []
        print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS), flush=True)

    def row(
        self, shape: str, what: str, nbytes: float, seconds: float, base: float | None = None, note: str = ""
    ) -> None:
        rate = nbytes / seconds / 1e9 if nbytes else 0
        values = [shape, what, f"{nbytes / 1e9:.2f}" if nbytes else "", f"{seconds:.4f}", f"{rate:.1f}" if rate else "",
                  f"{rate / base:.0%}" if base and rate else "", note]  # fmt: skip
        self.rows.append(dict(zip(COLUMNS, values, strict=True)))
        print("| " + " | ".join(values) + " |", flush=True)

    def late(self) -> bool:
        return time.monotonic() - self.began > self.options.budget

    def agreement(
        self,
        shape: str,
        held: list[dict[str, Any]],
        wanted: list[weights_pb2.WeightRank],
        shared: bool,
        bucket_mib: int = 0,
    ) -> weights_pb2.JoinResponse:
        """What the actor's rank 0 would answer; with its memory shared, receivers on this machine map it."""
        shapes, mib = shapes_of(shape), bucket_mib or self.options.bucket_mib
        bucket = mib << 20 if mib else default_bucket(sum(each["bytes"] for each in held))
        senders = [weights_pb2.WeightRank.FromString(base64.b64decode(each["rank"])) for each in held]
        for number, sender in enumerate(senders):
            if shared:
                sender.memory.ParseFromString(base64.b64decode(self.processes[number].ask("share")["memory"]))
        manifest = weights_pb2.WeightsManifest(version=1)
        for name, dtype in held[0]["infos"]:
            manifest.tensors.add(name=name, dtype=dtype, shape=shapes[name])
        everything = [piece for sender in senders for piece in sender.pieces]
        codec.complete(codec.Snapshot(manifest, (), (), torch.empty(0)), everything)
        store, endpoint = open_store(HOST)
        self.stores.append(store)
        return weights_pb2.JoinResponse(
            channel="gloo" if self.options.device == "cpu" else "nccl", group=f"g{time.monotonic_ns()}",
            store=endpoint, ranks=senders + wanted, senders=len(senders), manifest=manifest,
            bucket_bytes=min(bucket, CPU_BUCKET if self.options.device == "cpu" else 1 << 62),
            seconds=30,
            names=[f"sender{n}" for n in range(len(senders))] + [f"receiver{n}" for n in range(len(wanted))],
        )  # fmt: skip

    def play(
        self, answer: weights_pb2.JoinResponse, senders: list[int], receivers: list[int], times: int
    ) -> list[dict[str, Any]]:
        """The transfers; answers what the receivers measured, once every tensor's digest was right."""
        text = packed(answer)
        sending = [self.processes[p].tell("send", answer=text, rank=n, times=times) for n, p in enumerate(senders)]
        receiving = [
            self.processes[p].tell("receive", answer=text, rank=len(senders) + n, times=times)
            for n, p in enumerate(receivers)
        ]
        results = [answer() for answer in (*sending, *receiving)][len(senders) :]
        pieces = [weights_pb2.WeightPiece.FromString(base64.b64decode(p)) for each in results for p in each["pieces"]]
        kept = {name for rank in answer.ranks for name in rank.keeps}
        expected = {info.name: info.digest for info in answer.manifest.tensors if info.name not in kept}
        if digests_of(pieces, {i.name: i.shape for i in answer.manifest.tensors}) != expected:
            raise RuntimeError("the digests of what arrived are not those of what was sent")
        return results

    def whole(self, process: int, **fields: Any) -> weights_pb2.WeightRank:
        """A receiver that wants every tensor whole, unless `fields` say otherwise."""
        return weights_pb2.WeightRank(**{**self.places[process], **fields})

    def run_shape(self, shape: str) -> None:
        one = self.processes[0].ask("hold", shape=shape, senders=1, rank=0)
        nbytes = one["bytes"]
        self.row(shape, "publish: copy and digests", nbytes, one["seconds"])
        base = self.attempt(shape, lambda: self.baseline(shape, nbytes)) if self.two else None
        if self.two:
            self.attempt(shape, lambda: self.one_to_one(shape, one, nbytes, base))
        if self.on_gpu:
            self.attempt(shape, lambda: self.mapped(shape, one, nbytes, base))
            self.attempt(shape, lambda: self.colocated(shape, one, nbytes))
        if self.two:
            self.attempt(shape, lambda: self.sharded(shape, nbytes, base))
        for process in self.processes:
            process.ask("leave")
            process.ask("free")

    def attempt(self, shape: str, scenario: Callable[[], Any]) -> Any:
        """One that fails is said, and leaves the others their time."""
        try:
            return scenario()
        except Exception as error:  # noqa: BLE001 - whatever it is
            print(f"{shape}: {type(error).__name__}: {error}", flush=True)
            return None
        finally:
            self.write()

    def baseline(self, shape: str, nbytes: int) -> float:
        path = f"/tmp/sextet-bench-{os.getpid()}"
        tells = [
            self.processes[p].tell("baseline", store=path, rank=n, nbytes=nbytes, times=self.options.times)
            for n, p in enumerate((0, 3))
        ]
        seconds = statistics.median(max(pair) for pair in zip(*(tell()["seconds"] for tell in tells), strict=True))
        self.row(shape, "torch.distributed.broadcast", nbytes, seconds)
        return nbytes / seconds / 1e9

    def one_to_one(self, shape: str, held: dict[str, Any], nbytes: int, base: float | None) -> None:
        """From GPU 0 to GPU 1: by the wire, and from mapped memory."""
        answer = self.agreement(shape, [held], [self.whole(3, sees=())], False)
        [found] = self.play(answer, [0], [3], self.options.times + 1)
        note = f"first {found['first']['transfer']:.2f} s with its group; plan {found['first']['plan']:.3f} s once"
        note += f"; {found['beside'] / 2**20:.0f} MiB beside the weights" if self.on_gpu else ""
        self.row(shape, f"wire ({self.wire})", nbytes, statistics.median(found["seconds"]["transfer"]), base, note)
        self.row(shape, "receiver's digests", nbytes, statistics.median(found["seconds"]["sums"]))
        self.pause(shape, f"wire ({self.wire})", answer, nbytes)
        self.overlap(shape, answer, statistics.median(found["seconds"]["transfer"]))
        self.parts(shape, self.agreement(shape, [held], [self.whole(3, sees=())], False), nbytes)
        if self.on_gpu:
            answer = self.agreement(shape, [held], [self.whole(3, sees=())], False, bucket_mib=256)
            [found] = self.play(answer, [0], [3], self.options.times + 1)
            seconds = statistics.median(found["seconds"]["transfer"])
            self.row(shape, f"wire ({self.wire}), buckets of 256 MiB", nbytes, seconds, base)
        self.processes[3].ask("free")
        # Of a frozen model the last layer learns: the others' digests are the receiver's already.
        last = f"layers.{SHAPES[shape][2] - 1}."
        keeps = [name for name in shapes_of(shape) if last not in name]
        answer = self.agreement(shape, [held], [self.whole(3, sees=(), keeps=keeps)], False)
        [found] = self.play(answer, [0], [3], self.options.times + 1)
        sent = sum(bucket.nbytes for bucket in read_agreement(answer, WIDTHS).schedule.buckets)
        note = "only what changed: one layer; the rest is there"
        self.row(shape, f"wire ({self.wire})", sent, statistics.median(found["seconds"]["transfer"]), note=note)
        self.processes[3].ask("free")

    def parts(self, shape: str, answer: weights_pb2.JoinResponse, nbytes: int) -> None:
        """What the wire's time is made of, on either side."""
        text = packed(answer)
        tells = [self.processes[p].tell("parts", answer=text, rank=n) for n, p in enumerate((0, 3))]
        for side, found in zip(("sender", "receiver"), [tell() for tell in tells], strict=True):
            note = f"{found['broadcasts']} broadcasts, the first called after {found['first']:.2f} ms, all after "
            note += f"{found['called']:.2f}; copies {found['copies']:.2f} ms, wire {found['wire']:.2f}, calls "
            note += f"{found['calls']:.2f}, late {found['late']:.2f}"
            note += f"; NCCL's kernels {found['kernels']:.2f} ms" if self.on_gpu else ""
            self.row(shape, f"parts of the wire: {side}", nbytes, found["seconds"], note=note)

    def overlap(self, shape: str, answer: weights_pb2.JoinResponse, transfer: float) -> None:
        """What the actor's training sees of a sync that goes on beside it."""
        text = packed(answer)
        training = self.processes[0].tell("train", answer=text, rank=0)
        self.processes[3].ask("receive", answer=text, rank=1, times=1)
        seen = training()
        alone, during = statistics.median(seen["alone"]), seen["during"]
        note = f"{len(during)} training steps meanwhile, median {statistics.median(during) * 1e3:.1f} ms, alone "
        note += f"{alone * 1e3:.1f}; sync and steps one after another {transfer + len(during) * alone:.4f} s"
        self.row(shape, "training beside a sync", 0, seen["seconds"], note=note)

    def mapped(self, shape: str, held: dict[str, Any], nbytes: int, base: float | None) -> None:
        """From GPU 0 to GPU 1, copied from mapped memory."""
        if not self.two:
            return
        answer = self.agreement(shape, [held], [self.whole(3)], True)
        if read_agreement(answer, WIDTHS).schedule.routes:
            print(f"{shape}: GPU 1 cannot map the memory of GPU 0", flush=True)
            return
        [found] = self.play(answer, [0], [3], self.options.times + 1)
        note = f"first {found['first']['transfer']:.3f} s; {found['beside'] / 2**20:.0f} MiB beside the weights"
        seconds = statistics.median(found["seconds"]["transfer"])
        self.row(shape, "mapped from the other GPU", nbytes, seconds, base, note)
        self.pause(shape, "mapped", answer, nbytes)
        self.processes[3].ask("free")

    def pause(self, shape: str, how: str, answer: weights_pb2.JoinResponse, nbytes: int) -> None:
        """What a loop that reads all weights, as decoding does, sees of a sync."""
        text = packed(answer)
        sending, pausing = self.processes[0], self.processes[3]
        tells = [sending.tell("send", answer=text, rank=0, times=1), pausing.tell("pause", answer=text, rank=1)]
        seen = [tell() for tell in tells][1]
        alone, during = statistics.median(seen["alone"]), seen["during"] or [0.0]
        note = f"step alone {alone * 1e3:.1f} ms; during {how}: median {statistics.median(during) * 1e3:.1f}, "
        note += f"at most {max(during) * 1e3:.1f}, {len(during)} steps; swapping took {seen['swap'] * 1e3:.2f} ms"
        self.row(shape, "pause: copied into place", nbytes, seen["copy"], note=note)

    def colocated(self, shape: str, held: dict[str, Any], nbytes: int) -> None:
        """Sender and receiver are two processes on GPU 0."""
        answer = self.agreement(shape, [held], [self.whole(2)], True)
        mapped = self.processes[2].ask("map", answer=packed(answer))
        self.row(shape, "same GPU: mapped, no copy", 0, mapped["seconds"])
        self.processes[2].ask("free")
        answer = self.agreement(shape, [held], [self.whole(2)], True)
        [found] = self.play(answer, [0], [2], 2)
        note = f"{found['beside'] / 2**20:.0f} MiB beside the weights"
        seconds = statistics.median(found["seconds"]["transfer"])
        self.row(shape, "same GPU: copied once", nbytes, seconds, note=note)
        self.processes[2].ask("free")

    def sharded(self, shape: str, nbytes: int, base: float | None) -> None:
        """FSDP's rows on both GPUs to TP2 with fused qkv and gate-up on both."""
        tells = [self.processes[n].tell("hold", shape=shape, senders=2, rank=n) for n in (0, 1)]
        held = [tell() for tell in tells]
        layout = tensor_parallel(shapes_of(shape), 2)
        own = [[piece_message(p) for p in layout.pieces if p.rank == rank] for rank in (0, 1)]
        for what, sees in ((f"by {self.wire}", {"sees": ()}), ("mapped", {})):
            if what == "mapped" and not self.on_gpu:
                continue
            wanted = [self.whole(2 + rank, pieces=own[rank], **sees) for rank in (0, 1)]
            answer = self.agreement(shape, held, wanted, self.on_gpu)
            schedule = read_agreement(answer, WIDTHS).schedule
            sent = sum(bucket.nbytes for bucket in schedule.buckets)
            found = self.play(answer, [0, 1], [2, 3], 3)
            seconds = max(statistics.median(each["seconds"]["transfer"]) for each in found)
            note = (
                f"{sent / 1e9:.2f} GB in {len(schedule.buckets)} buckets over {len(schedule.routes)} routes, the rest "
            )
            note += f"mapped; plan {max(each['first']['plan'] for each in found):.3f} s once"
            note += (
                f"; {max(each['beside'] for each in found) / 2**20:.0f} MiB beside the weights" if self.on_gpu else ""
            )
            self.row(shape, f"FSDP2 on both to TP2 on both, {what}", nbytes, seconds, base, note)

    def write(self) -> None:
        out = Path(self.options.out or os.environ.get("OUT") or Path(__file__).parent / "results")
        out.mkdir(parents=True, exist_ok=True)
        name = f"weights-{self.options.device}"
        devices = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
        facts = {"torch": torch.__version__, "gpus": devices, "bucket_mib": self.options.bucket_mib, "rows": self.rows}
        (out / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n")
        lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
        lines += ["| " + " | ".join(row.values()) + " |" for row in self.rows]
        buckets = f", buckets of {self.options.bucket_mib} MiB" if self.options.bucket_mib else ""
        heading = f"torch {facts['torch']}, {', '.join(devices) or 'CPU'}{buckets}\n\n"
        (out / f"{name}.md").write_text(heading + "\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["tiny"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--bucket-mib", type=int, help="default: by the size of the model")
    parser.add_argument("--times", type=int, default=5, help="transfers measured; the median counts")
    parser.add_argument("--budget", type=float, default=180.0, help="seconds after which no further shape begins")
    parser.add_argument("--out")
    options = parser.parse_args()
    if options.child is not None:
        serve(options.child)
        return
    # NVLink multicast can put a shared host's GPUs out of service.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    bench = Bench(options)
    try:
        for shape in options.shapes:
            if bench.late():
                print(f"no time left for {shape}", flush=True)
                break
            bench.attempt(shape, lambda shape=shape: bench.run_shape(shape))
            print(f"({time.monotonic() - bench.began:.0f} s)", flush=True)
    finally:
        for process in bench.processes:
            process.end()


if __name__ == "__main__":
    main()
