"""Tokens per second of the rollout service through gRPC, of bare vLLM and of Hugging Face generate, in one table.

    python bench/rollout.py --model models/smollm2 --rows 16,64 --prompt 64 --response 64      # on a CPU
    python bench/rollout.py --shape 1b --rows 256,512 --prompt 512 --response 256 --hf-rows 128 --json OUT.json
    python bench/rollout.py --shape 13b --rows 256,512 --prompt 512 --response 256 --engines service-vllm,bare --tries 1
    python bench/rollout.py --shape 1b --together --engine-args '{"gpu_memory_utilization": 0.4}' \
        --rows 256,512 --prompt 512 --response 256 --engines service-vllm,bare
    python bench/rollout.py --shape 1b --replicas 2 --engines service-vllm ...                  # on two GPUs
    python bench/rollout_gpus.py                                            # all of that in one call, on two GPUs

A shape is a Llama with random weights and a vocabulary of plain words. Engines run one after the other, each started
once in a process of its own, and get the same prompts; with --together all are loaded and have their tries by turns, as
a host is not as fast at all times. A line is printed when it is measured, and the table holds what was measured when
--seconds are over. The service is a served role in another process: Generate and the read of its
block are timed together. With --replicas R, R services have a GPU each: one of them is measured alone, then all with
as many rows each. A result is the median of --tries.
"""

import argparse
import asyncio
import contextlib
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.rollout_shapes import SHAPES, write_prompts, write_shape

ROOT = Path(__file__).resolve().parent.parent
WARM_TOKENS = 4
"""Made of every row before anything is timed."""
MARK = "bench: "
END_SECONDS = 20
"""In which a process that has said its last word ends by itself."""


class Child:
    """A process of a script like this one, in a session of its own; what it prints for us are lines of JSON."""

    def __init__(self, job: Path, what: str, gpu: int = 0, script: str = __file__) -> None:
        self.what = what
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        device = devices[gpu] if gpu < len(devices) and devices[0] else str(gpu)
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": device}
        # vLLM on CPUs wants most of the memory otherwise; the service sets the same.
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        self._process = subprocess.Popen(
            [sys.executable, script, "--job", str(job), what],
            cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True,
        )  # fmt: skip
        self._said: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        # All of it is read: an engine whose log nobody reads stands still when the pipe is full.
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith(MARK):
                self._said.put(json.loads(line[len(MARK) :]))
            else:
                print(line, end="", file=sys.stderr)
        self._said.put(None)

    def go(self) -> None:
        """Its imports are done or under way: it may take the device now."""
        self.tell("go")

    def tell(self, line: str) -> None:
        """What it reads next."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def said(self) -> Any:
        """The next thing it says; None: it has nothing more to say."""
        return self._said.get()

    def kill(self) -> None:
        """With all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Waits for its end, which says how it was, and kills what is left of it and of its engine."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            code = self._process.wait(END_SECONDS)
            print(f"{self.what}: exit {code}", file=sys.stderr, flush=True)
        except subprocess.TimeoutExpired:
            print(f"{self.what}: did not end within {END_SECONDS} s: killed", file=sys.stderr, flush=True)
        self.kill()
        self._process.wait()


def say(content: Any) -> None:
    """A line for the parent."""
    print(MARK + json.dumps(content), flush=True)


def wait_for_go() -> None:
    if not sys.stdin.readline():
        sys.exit(1)


def result(rows: int, found: Sequence[tuple[int, float]], variant: dict[str, Any]) -> dict[str, Any]:
    """Of tries, each so many tokens in so many seconds."""
    speeds = [tokens / seconds for tokens, seconds in found]
    speeds_of = {"tokens": found[-1][0], "tokens_per_second": statistics.median(speeds), "tries": speeds}
    return {"rows": rows, "replicas": 1, **variant, **speeds_of}


def answer(generate: Callable[..., int]) -> None:
    """Says how many tokens `generate` made, and in how many seconds, of every line of arguments that it is told."""
    say("ready")
    for told in sys.stdin:
        started = time.perf_counter()
        tokens = generate(**json.loads(told))
        say([tokens, time.perf_counter() - started])


def run_bare(job: dict[str, Any]) -> None:
    """LLM.generate on token ids, without text: bare, and with the seeds and log-probs that the service asks for."""
    import torch
    from vllm import LLM, SamplingParams

    wait_for_go()
    length = -(-(job["prompt"] + job["response"]) // 64) * 64
    llm = LLM(
        model=job["model"], dtype=job["dtype"], skip_tokenizer_init=True, max_model_len=length,
        enforce_eager=not torch.cuda.is_available(), **engine_arguments(job),
    )  # fmt: skip

    def generate(rows: int, tokens: int, likely: bool = False) -> int:
        common = {"temperature": 1.0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False}
        own = [{"seed": row, "logprobs": 0, "flat_logprobs": True} if likely else {} for row in range(rows)]
        asked: list[Any] = [{"prompt_token_ids": ids} for ids in job["ids"][:rows]]
        outputs = llm.generate(asked, [SamplingParams(**common, **options) for options in own], use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    answer(generate)


def run_hf(job: dict[str, Any]) -> None:
    """model.generate of one padded batch with the model's default attention."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    wait_for_go()
    device, dtype = "cuda" if torch.cuda.is_available() else "cpu", getattr(torch, job["dtype"])
    if job["shape"]:
        with torch.device(device):
            # Said everywhere: the default is to ask on the terminal whether code that comes with a model may run.
            config = AutoConfig.from_pretrained(job["model"], trust_remote_code=False)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    else:
        model = AutoModelForCausalLM.from_pretrained(
            job["model"], dtype=dtype, trust_remote_code=False, use_safetensors=True
        ).to(device)
    model.eval()
    shortest = min(map(len, job["ids"]))

    def generate(rows: int, tokens: int) -> int:
        ids_BT = torch.tensor([ids[:shortest] for ids in job["ids"][:rows]], device=device)
        with torch.inference_mode():
            made_BT = model.generate(
                ids_BT, attention_mask=torch.ones_like(ids_BT), do_sample=True, top_k=0, eos_token_id=None,
                max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0,
            )  # fmt: skip
        return made_BT[:, shortest:].numel()

    answer(generate)


def run_serve(job: dict[str, Any]) -> None:
    """A rollout service; says its endpoint, and ends when its input does."""
    import torch  # noqa: F401 - what takes long, before it may take the device

    from services.rollout.__main__ import build
    from services.rollout.settings import RolloutSettings
    from tests.fakes.role import fake_role

    with contextlib.suppress(ImportError):
        import vllm  # noqa: F401 # pyright: ignore[reportMissingImports, reportUnusedImport]

    async def serve() -> None:
        threads = int(os.environ.get("OMP_NUM_THREADS", "0"))
        async with fake_role(
            build, RolloutSettings, threads=threads, probe_deadline=120, replica="rollout-0"
        ) as served:
            say(served.endpoint)
            await asyncio.to_thread(sys.stdin.read)

    wait_for_go()
    asyncio.run(serve())


def engine_arguments(job: dict[str, Any]) -> dict[str, Any]:
    """Both vLLM engines get these."""
    common = {"max_num_seqs": max(job["rows"]), "enable_prefix_caching": False, **job["engine_args"]}
    return {**common, "load_format": "dummy"} if job["shape"] else common


class Direct:
    """An engine in a process that is told what to make.

    Attributes:
        rows, tries: what is measured.
        variants: ways to ask it, by what the table says of them.
    """

    def __init__(self, job: dict[str, Any], what: str, child: Child) -> None:
        self._child = child
        self.rows, self.tries = (job["hf_rows"], 1) if what == "hf" else (job["rows"], job["tries"])
        self.variants: list[dict[str, Any]] = [{}]
        if what == "bare" and job.get("likely", True):
            self.variants.append({"likely": True})

    async def start(self) -> None:
        self._child.go()
        await self._heard()

    async def make(self, rows: int, tokens: int, variant: dict[str, Any]) -> tuple[int, float]:
        """Tokens and seconds."""
        self._child.tell(json.dumps({"rows": rows, "tokens": tokens, **variant}))
        return await self._heard()

    async def close(self) -> None: ...

    async def _heard(self) -> Any:
        said = await asyncio.to_thread(self._child.said)
        if said is None:
            raise RuntimeError("the engine's process has ended")
        return said


class Client:
    """The controller's part: Configure and Generate, and a reader's: the block. Attributes: as `Direct` has them."""

    def __init__(self, job: dict[str, Any], engine: str, children: Sequence[Child]) -> None:
        from shared.batch.reader import BatchReader
        from shared.rpc.client import Connections
        from tests.fakes.role import TOKEN

        self._job, self._engine, self._children, self._step = job, engine, children, 0
        self._connections = Connections(TOKEN)
        self._channels: list[Any] = []
        self._reader = BatchReader(self._connections, None)
        self.rows, self.tries = job["rows"], job["tries"]
        self.variants = [{"replicas": size} for size in sorted({1, len(children)})]

    async def start(self) -> None:
        for child in self._children:
            child.go()
        endpoints = await asyncio.gather(*(asyncio.to_thread(child.said) for child in self._children))
        if None in endpoints:
            raise RuntimeError("the service does not start")
        self._channels = [self._connections.channel(endpoint) for endpoint in endpoints]
        started = time.perf_counter()
        await self.configure()
        print(
            f"service-{self._engine}: configured in {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True
        )

    async def configure(self) -> None:
        from shared.config import dump_config
        from shared.config_loading import load_config
        from shared.gen.sextet.v1 import role_pb2, role_pb2_grpc

        job = self._job
        config = load_config(
            {
                "model": {"path": job["model"], "dtype": job["dtype"]},
                "data": {"path": job["data"], "max_prompt_tokens": job["prompt"] + 64},
                "reward": {"function": "none:none"},
                "total_steps": 1,
                "rollout": {
                    "engine": self._engine, "max_tokens": job["response"], "slots": min(max(job["rows"]), 16),
                    "min_tokens": 0 if job["shape"] else job["response"],
                    "engine_args": engine_arguments(job) if self._engine == "vllm" else {},
                },
            }
        )  # fmt: skip
        request = role_pb2.ConfigureRequest(
            operation=self._operation("rollout.configure"), config_json=dump_config(config)
        )
        await self._all(
            lambda channel: role_pb2_grpc.RoleServiceStub(channel).Configure, [request] * len(self._channels)
        )

    async def close(self) -> None:
        await self._connections.close()

    async def make(self, rows: int, tokens: int, variant: dict[str, Any]) -> tuple[int, float]:
        """Tokens and seconds."""
        from shared.batch import refs
        from shared.gen.sextet.v1 import rollout_pb2, rollout_pb2_grpc

        self._step += 1
        # Rows that a budget cuts are kept for a later step, which whole ones are not.
        budget = 0 if tokens == self._job["response"] else tokens
        prompts = [rollout_pb2.PromptRow(uid=f"{self._step}:{i}:0", index=i, samples=[0]) for i in range(rows)]
        request = rollout_pb2.GenerateRequest(
            operation=self._operation("rollout.generate"), prompts=prompts, budget=budget
        )
        started = time.perf_counter()
        answers = await self._all(
            lambda channel: rollout_pb2_grpc.RolloutServiceStub(channel).Generate, [request] * variant["replicas"]
        )
        blocks = await asyncio.gather(
            *(self._reader.read(refs.merge(answer.block), timeout=self._job["seconds"]) for answer in answers)
        )
        seconds = time.perf_counter() - started
        return sum(int(block["response_ids"].lengths.sum()) for block in blocks), seconds

    async def _all(self, method: Callable[[Any], Any], requests: Sequence[Any]) -> list[Any]:
        from shared.rpc.client import call

        return await asyncio.gather(
            *(
                call(method(channel), request, timeout=self._job["seconds"])
                for channel, request in zip(self._channels, requests, strict=False)
            )
        )

    def _operation(self, name: str) -> Any:
        from shared.gen.sextet.v1 import common_pb2

        return common_pb2.Operation(
            id=common_pb2.OperationId(run="bench", step=self._step, name=name, part="0"), epoch=1
        )


JOBS = {"bare": run_bare, "hf": run_hf, "serve": run_serve}
Found = Callable[[str, dict[str, Any]], None]
"""Told about an engine's result as soon as it is there."""


async def measure(job: dict[str, Any], engines: dict[str, Direct | Client], found: Found) -> None:
    """All tries of all of them; each number of rows by turns, as a host is not as fast at all times."""
    try:
        for engine in engines.values():
            await engine.start()
            for variant in engine.variants:
                await engine.make(max(engine.rows), WARM_TOKENS, variant)
        for rows in sorted({rows for engine in engines.values() for rows in engine.rows}):
            turns = [(what, v) for what, engine in engines.items() if rows in engine.rows for v in engine.variants]
            tries: list[list[tuple[int, float]]] = [[] for _ in turns]
            for number in range(job["tries"]):
                for (what, variant), made in zip(turns, tries, strict=True):
                    if number < engines[what].tries:
                        made.append(await engines[what].make(rows, job["response"], variant))
            for (what, variant), made in zip(turns, tries, strict=True):
                found(what, result(rows, made, variant))
    finally:
        for engine in engines.values():
            await engine.close()


def line(what: str, row: dict[str, Any], bare: float | None = None) -> str:
    """A row of the table; a share is of bare vLLM at the same rows."""
    share = f"{row['tokens_per_second'] / row['replicas'] / bare:.1%}" if bare else ""
    name = f"{what} x {row['replicas']}" if row["replicas"] > 1 else what
    name += ", seeds and log-probs" if row.get("likely") else ""
    return f"| {name} | {row['rows']} | {row['tokens_per_second']:,.0f} | {share} |"


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown."""
    bare = {row["rows"]: row["tokens_per_second"] for row in results.get("bare", []) if not row.get("likely")}
    lines = ["| engine | rows (each) | tokens/s | of bare vLLM |", "| --- | ---: | ---: | ---: |"]
    return "\n".join(lines + [line(what, row, bare.get(row["rows"])) for what, rows in results.items() for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model directory")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--engines", default="service-vllm,bare,hf", help="of service-vllm, service-hf, bare, hf")
    for name, default in (("--rows", "16,64"), ("--hf-rows", "16")):
        parser.add_argument(name, default=default, type=lambda text: [int(part) for part in text.split(",")])
    for name, default in (("--prompt", 64), ("--response", 64), ("--tries", 3), ("--replicas", 1), ("--seconds", 3600)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--engine-args", default={}, type=json.loads)
    parser.add_argument("--together", action="store_true", help="all at once on the device, measured by turns")
    parser.add_argument("--json", type=Path, help="where results are written")
    parser.add_argument("--job", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        path, what = options.job
        return JOBS[what](json.loads(Path(path).read_text()))
    if (options.model is None) == (options.shape is None):
        parser.error("give one of --model and --shape")
    with tempfile.TemporaryDirectory() as work:
        results = run(options, Path(work))
    title = f"{options.shape or Path(options.model).name}, {options.prompt} in, {options.response} out, {options.dtype}"
    print(f"\n{title}\n\n{table(results)}")
    if options.json:
        options.json.write_text(json.dumps({"title": title, "results": results}, indent=1) + "\n")
    return None


def write_job(options: argparse.Namespace, work: Path) -> Path:
    """Model, dataset and all that a child needs to know."""
    from transformers import AutoTokenizer

    model = work / "model" if options.shape else Path(options.model)
    if options.shape:
        write_shape(options.shape, model, options.prompt + options.response)
    most = max(options.rows + options.hf_rows)
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    ids = write_prompts(tokenizer, most, options.prompt, work / "prompts.jsonl")
    job = {**vars(options), "model": str(model), "data": str(work / "prompts.jsonl"), "ids": ids, "json": None}
    path = work / "job.json"
    path.write_text(json.dumps(job))
    return path


def run(options: argparse.Namespace, work: Path) -> dict[str, list[dict[str, Any]]]:
    """Every engine in its turn; one that fails, or is not done in time, keeps the rows that it has."""
    path, end = write_job(options, work), time.monotonic() + options.seconds
    results: dict[str, list[dict[str, Any]]] = {}
    # All import at once, which takes long; one after the other takes the device.
    children = {what: start(path, what, options.replicas) for what in options.engines.split(",")}
    groups = [children] if options.together else [{what: each} for what, each in children.items()]
    for group in groups:
        results |= {what: [] for what in group}
        take_turn(json.loads(path.read_text()), group, results, end)
    return results


def kill_all(children: Sequence[Child]) -> None:
    """Their time is up."""
    print(f"{children[0].what}: its time is up", file=sys.stderr, flush=True)
    for child in children:
        child.kill()


def start(path: Path, what: str, replicas: int) -> list[Child]:
    """The processes of an engine."""
    return [Child(path, "serve", gpu) for gpu in range(replicas)] if "service" in what else [Child(path, what)]


def take_turn(
    job: dict[str, Any], group: dict[str, list[Child]], results: dict[str, list[dict[str, Any]]], end: float
) -> None:
    """Measures engines until they are done or it is `end`; what is measured is printed and added to their results."""
    everybody = [child for children in group.values() for child in children]

    def found(what: str, row: dict[str, Any]) -> None:
        results[what].append(row)
        print(line(what, row), flush=True)

    def engine(what: str, children: list[Child]) -> Direct | Client:
        service, _, name = what.partition("-")
        return Client(job, name, children) if service == "service" else Direct(job, what, children[0])

    alarm = threading.Timer(max(0.0, end - time.monotonic()), kill_all, [everybody])
    alarm.start()
    try:
        asyncio.run(measure(job, {what: engine(what, children) for what, children in group.items()}, found))
    except Exception as error:  # noqa: BLE001 - the others are still to be measured
        print(f"{', '.join(group)}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    for child in everybody:
        child.end()
    alarm.cancel()
    alarm.join()


if __name__ == "__main__":
    main()
