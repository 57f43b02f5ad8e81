"""A process of bench/weights.py, which sends, receives, trains or decodes as it is told, and the one that tells it."""

import base64
import dataclasses
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bench.weights_parts import Parts
from bench.weights_shapes import shapes_of
from shared.gen.sextet.v1 import weights_pb2
from shared.rpc.memory import keep_freed_memory
from shared.weights import codec
from shared.weights.agreement import piece_message
from shared.weights.digest import on_host
from shared.weights.memory import device_name, mapped_buffers, share_memory, this_host, visible_devices
from shared.weights.part import WirePart
from shared.weights.plan import sharded
from shared.weights.sums import box_sums

HOST = "127.0.0.1"
CHUNK = 1 << 30
PATIENCE = 50
"""Seconds for one command."""


class Child:
    """One process: answers commands of the parent, one JSON line each."""

    def __init__(self, gpu: int) -> None:
        self.device = torch.device("cpu") if gpu < 0 else torch.device("cuda", gpu)
        if gpu >= 0:
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)
        self.part = WirePart(HOST)
        self.held: codec.Snapshot | None = None
        self.received: dict[str, torch.Tensor] = {}
        self.pieces: list[weights_pb2.WeightPiece] = []

    def hold(self, shape: str, senders: int, rank: int) -> dict[str, Any]:
        """Makes random weights, this rank's rows of each, and publishes them."""
        self.free()
        shapes = shapes_of(shape)
        generator = torch.Generator(self.device).manual_seed(rank)
        layout = sharded(shapes, senders)
        tensors = {
            piece.tensor: torch.randn(piece.box.size, dtype=torch.bfloat16, device=self.device, generator=generator)
            for piece in layout.pieces
            if piece.rank == rank
        }
        # The first time makes the factors of the sums, which stay.
        codec.snapshot(1, tensors)
        self._sync()
        began = time.perf_counter()
        held = codec.snapshot(1, tensors)
        self._sync()
        seconds = time.perf_counter() - began
        del tensors
        self._trim()
        own = [piece_message(piece) for piece in layout.pieces if piece.rank == rank]
        for piece, summed in zip(own, held.pieces, strict=True):
            # A shard was published as if it were whole: its sums are made again at its place.
            assert piece.tensor == summed.tensor
            piece.at = summed.at
        self.held = dataclasses.replace(held, pieces=tuple(self._placed(own, held, shapes)))
        message = weights_pb2.WeightRank(host=this_host(), device=device_name(self.device), pieces=self.held.pieces)
        infos = [(i.name, i.dtype) for i in held.manifest.tensors]
        return {"rank": packed(message), "seconds": seconds, "bytes": self.held.nbytes, "infos": infos}

    def _placed(self, own, held, shapes) -> Iterator[weights_pb2.WeightPiece]:
        sums = [box_sums(t, p.start, shapes[p.tensor]) for p, t in zip(own, held.tensors, strict=True)]
        for piece, each in zip(own, on_host(sums), strict=True):
            piece.sums.extend(each)
            yield piece

    def share(self) -> dict[str, Any]:
        """A handle of the memory, for one process that maps it."""
        assert self.held is not None
        began = time.perf_counter()
        return {"memory": packed(share_memory(self.held.memory)), "seconds": time.perf_counter() - began}

    def place(self) -> dict[str, Any]:
        return {"host": this_host(), "device": device_name(self.device), "sees": visible_devices(self.device)}

    def send(self, answer: str, rank: int, times: int) -> dict[str, Any]:
        assert self.held is not None
        message = weights_pb2.JoinResponse.FromString(base64.b64decode(answer))
        for _ in range(times):
            self.part.send(message, rank, self.held.by_name, None)
        return {}

    def receive(self, answer: str, rank: int, times: int) -> dict[str, Any]:
        """Several transfers one after another; the first one makes the group and is not counted."""
        message = weights_pb2.JoinResponse.FromString(base64.b64decode(answer))
        seconds: dict[str, list[float]] = {"plan": [], "transfer": [], "sums": []}
        self._reset_peak()
        before = self._allocated()
        for _ in range(times):
            self.received, self.pieces = {}, []
            self.received, self.pieces = self.part.receive(message, rank, self.device)
            for what, each in self.part.seconds.items():
                seconds[what].append(each)
        own = sum(tensor.nbytes for tensor in self.received.values())
        return {
            "seconds": {what: each[1:] or each for what, each in seconds.items()},
            "first": {what: each[0] for what, each in seconds.items()},
            "pieces": [packed(piece) for piece in self.pieces],
            "beside": max(0, self._peak() - before - own),
        }

    def parts(self, answer: str, rank: int) -> dict[str, Any]:
        """What a transfer's time is made of here, on the group's third transfer."""
        parts, key = Parts(self.device), "TORCH_NCCL_ENABLE_TIMING"
        # Read when the group is made; the other transfers go untimed.
        os.environ[key] = "1"
        try:
            with parts.watched():
                if rank:
                    self.receive(answer, rank, 3)
                else:
                    self.send(answer, rank, 3)
        finally:
            del os.environ[key]
        return {"seconds": self.part.seconds["transfer"], **parts.found()}

    def train(self, answer: str, rank: int) -> dict[str, Any]:
        """Steps of a small training loop alone, then for as long as a version is being sent beside them."""
        assert self.held is not None
        message, held = weights_pb2.JoinResponse.FromString(base64.b64decode(answer)), self.held.by_name
        layer = torch.nn.Linear(1024, 1024, device=self.device)
        inputs = torch.randn(512, 1024, device=self.device)

        def step() -> float:
            began = time.perf_counter()
            layer(inputs).square().mean().backward()
            self._sync()
            return time.perf_counter() - began

        alone = [step() for _ in range(8)][3:]
        thread = threading.Thread(target=self.part.send, args=(message, rank, held, None), daemon=True)
        began = time.perf_counter()
        thread.start()
        during = [step()]
        while thread.is_alive():
            during.append(step())
        thread.join()
        return {"alone": alone, "during": during, "seconds": time.perf_counter() - began}

    def map(self, answer: str) -> dict[str, Any]:
        """Uses another process's weights where they are: nothing is copied."""
        message = weights_pb2.JoinResponse.FromString(base64.b64decode(answer))
        self.received = {}
        began = time.perf_counter()
        dtypes = {info.name: info.dtype for info in message.manifest.tensors}
        self.received = dict(mapped_buffers(message.ranks[0], dtypes))
        self._sync()
        seconds = time.perf_counter() - began
        last = next(reversed(self.received.values())).float().sum().item()
        return {"seconds": seconds, "sum": last}

    def baseline(self, store: str, rank: int, nbytes: int, times: int) -> dict[str, Any]:
        """torch.distributed.broadcast of as many bytes, in chunks of 1 GiB, in a default group of its own."""
        backend = "gloo" if self.device.type == "cpu" else "nccl"
        if not dist.is_initialized():
            dist.init_process_group(backend, store=dist.FileStore(store, 2), rank=rank, world_size=2,
                                    timeout=timedelta(seconds=60))  # fmt: skip
        chunks = [
            torch.empty(min(CHUNK, nbytes - at), dtype=torch.uint8, device=self.device)
            for at in range(0, nbytes, CHUNK)
        ]
        seconds = []
        for _ in range(times + 1):
            dist.barrier()
            self._sync()
            began = time.perf_counter()
            for number in range(len(chunks)):
                dist.broadcast(chunks[number], 0)
            self._sync()
            seconds.append(time.perf_counter() - began)
        chunks.clear()
        self._trim()
        return {"seconds": seconds[1:]}

    def pause(self, answer: str, rank: int) -> dict[str, Any]:
        """Reads all serving weights in a loop, as decoding does, while a version arrives and is committed."""
        message = weights_pb2.JoinResponse.FromString(base64.b64decode(answer))
        serving = {name: tensor.clone() for name, tensor in self.received.items()}
        self.received = {}
        arrived: dict[str, torch.Tensor] = {}
        inputs = {
            t.shape[1]: torch.ones(t.shape[1], 1, dtype=t.dtype, device=t.device)
            for t in serving.values()
            if t.ndim == 2
        }

        def step() -> float:
            began = time.perf_counter()
            for tensor in serving.values():
                if tensor.ndim == 2:
                    torch.mm(tensor, inputs[tensor.shape[1]])
            self._sync()
            return time.perf_counter() - began

        def receive() -> None:
            arrived.update(self.part.receive(message, rank, self.device)[0])

        alone = [step() for _ in range(8)][3:]
        thread = threading.Thread(target=receive, daemon=True)
        thread.start()
        during = []
        while thread.is_alive():
            during.append(step())
        thread.join()
        began = time.perf_counter()
        for name, tensor in arrived.items():
            serving[name].copy_(tensor)
        self._sync()
        copied = time.perf_counter() - began
        began = time.perf_counter()
        serving.update(arrived)
        swapped = time.perf_counter() - began
        self.received = arrived
        return {"alone": alone, "during": during, "copy": copied, "swap": swapped}

    def free(self) -> dict[str, Any]:
        self.received, self.pieces, self.held = {}, [], None
        self._trim()
        return {}

    def leave(self) -> dict[str, Any]:
        self.part.close()
        return {}

    def _trim(self) -> None:
        if self._gpu:
            torch.cuda.empty_cache()

    def _sync(self) -> None:
        if self._gpu:
            torch.cuda.synchronize()

    def _reset_peak(self) -> None:
        if self._gpu:
            torch.cuda.reset_peak_memory_stats()

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() - sum(t.nbytes for t in self.received.values()) if self._gpu else 0

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self._gpu else 0

    @property
    def _gpu(self) -> bool:
        return self.device.type == "cuda"


def packed(message: Any) -> str:
    return base64.b64encode(message.SerializeToString()).decode()


def serve(gpu: int) -> None:
    # What libraries print must not get between the answers.
    keep_freed_memory()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    child = Child(gpu)
    for line in sys.stdin:
        command = json.loads(line)
        number = command.pop("number")
        try:
            answer = getattr(child, command.pop("do"))(**command)
        except Exception as error:  # noqa: BLE001 - the parent says it
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps({"number": number, **answer}) + "\n")
        answers.flush()


class Process:
    """A child as the parent sees it."""

    def __init__(self, script: str, gpu: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, script, "--child", str(gpu)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answers: queue.Queue[str] = queue.Queue()
        self._number = 0
        threading.Thread(target=self._listen, daemon=True).start()

    def tell(self, do: str, **fields: Any) -> Callable[[], dict[str, Any]]:
        """Gives a command; the result waits for the answer."""
        assert self._process.stdin
        self._number += 1
        number = self._number
        self._process.stdin.write(json.dumps({"do": do, "number": number, **fields}) + "\n")
        self._process.stdin.flush()

        def answer() -> dict[str, Any]:
            found: dict[str, Any] = {"number": 0}
            # Answers to commands that nobody waits for any more come first.
            while found["number"] < number:
                try:
                    found = json.loads(self._answers.get(timeout=PATIENCE))
                except queue.Empty:
                    raise RuntimeError(f"{do}: no answer within {PATIENCE} s") from None
            if "error" in found:
                raise RuntimeError(f"{do}: {found['error']}")
            del found["number"]
            return found

        return answer

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        return self.tell(do, **fields)()

    def _listen(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(json.dumps({"number": 1 << 60, "error": "the process ended"}))

    def end(self) -> None:
        self._process.kill()
        self._process.wait(10)
