"""The command line. Exit codes: 0 done, 1 the run failed, 2 bad usage or configuration, 3 not reachable, 130 Ctrl-C.

Text for people goes to stderr; stdout carries what was asked for, as JSON with --json.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.table import Column, Table

from sextet.client import Client, run_id
from sextet.completion import complete_override, complete_role, complete_run
from sextet.endpoint import STATE_DIR, read_state
from sextet.local import ROLES, LocalError, LocalServices
from sextet.progress import OVER, Progress
from sextet.report import picture, places, profile_report, summary
from sextet.screen import console, screen, tell
from sextet.services import keep_up, services_for_run, start_detached, stop_detached
from shared.config import ConfigError, RunConfig
from shared.config_loading import load_config
from shared.devices import parse_devices
from shared.gen.sextet.v1 import controller_pb2 as pb
from shared.presets import describe_preset
from shared.rpc.errors import (
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    SextetError,
    Unauthenticated,
    Unavailable,
)
from shared.rpc.lifetime import PARENT_VARIABLE
from shared.rpc.tls import TlsError, load_tls
from shared.rpc.token import TokenError

PIPE_WIDTH = 240
EXIT_FAILED, EXIT_USAGE, EXIT_UNREACHABLE, EXIT_INTERRUPTED = 1, 2, 3, 130
REFUSALS = (InvalidArgument, NotFound, AlreadyExists, FailedPrecondition)
DEMO = Path(__file__).resolve().parent.parent / "examples"

app = typer.Typer(
    name="sextet",
    help="Post-trains language models by reinforcement learning, as six services.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RunId = Annotated[str, typer.Argument(help="The run's id.", autocompletion=complete_run)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="actor.optimizer.lr=1e-6 ...", autocompletion=complete_override),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1, help="Threads each process started here computes with; default: OMP_NUM_THREADS, else one per core."
    ),
]
Devices = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ROLE=N,N",
        envvar="SEXTET_DEVICES",
        help="GPUs of a role, by number, within CUDA_VISIBLE_DEVICES where that is set: actor=0,1 is one rank on each. "
        "Roles may share some; named again, a role's next replica is meant, and further ones begin again. "
        "Roles that are not named see all.",
    ),
]


@app.command()
def up(
    foreground: Annotated[bool, typer.Option("--foreground", help="Stay; Ctrl-C ends the services.")] = False,
    rollouts: Annotated[int, typer.Option(min=1, help="Rollout replicas.")] = 1,
    port: Annotated[int, typer.Option(help="Of the controller's gRPC API; 0 picks a free one.")] = 0,
    http_port: Annotated[int, typer.Option(help="Of its HTTP API; 0 picks a free one.")] = 0,
    redis: Annotated[str | None, typer.Option(envvar="SEXTET_REDIS_URL", help="A Redis to use; default: own.")] = None,
    threads: Threads = None,
    devices: Devices = None,
    as_json: Json = False,
) -> None:
    """Starts all six services on this machine and answers when they are ready."""
    devices = devices or []
    check_devices(devices)
    if foreground:
        options: dict[str, Any] = {"port": port, "http_port": http_port, "redis_url": redis, "threads": threads}
        options["devices"] = devices
        with LocalServices(replicas={"rollout": rollouts}, tell=tell, **options) as local:
            tell(f"ready: gRPC {local.endpoint}, HTTP {page(local.http)}; Ctrl-C ends them")
            keep_up(local)
        return
    given = {"--rollouts": rollouts, "--port": port, "--http-port": http_port, "--threads": threads}
    if redis:
        # Not as an argument: the URL may hold a password, and command lines are public.
        os.environ["SEXTET_REDIS_URL"] = redis
    arguments = [text for flag, value in given.items() if value for text in (flag, str(value))]
    state = start_detached([*arguments, *(text for entry in devices for text in ("--devices", entry))])
    out(
        {"pid": state.pid, "controller": state.controller, "http": state.http},
        f"up: gRPC {state.controller}, HTTP {page(state.http)}, logs {STATE_DIR / 'logs'}; `sextet down` ends them",
        as_json,
    )


@app.command()
def down(as_json: Json = False) -> None:
    """Ends the services of this directory; runs in progress are taken up again by the next `sextet up`."""
    ended = stop_detached()
    out({"ended": ended}, "down" if ended else "no services run in this directory", as_json)


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="A YAML or JSON file.")],
    overrides: Overrides = None,
    detach: Annotated[bool, typer.Option("--detach", help="Queue it and leave; needs `sextet up`.")] = False,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Plays a run and shows it; Ctrl-C cancels it. With no services up, starts them and ends them afterwards."""
    loaded = load_config(config, overrides or ())
    if detach:
        with Client() as client:
            queued = client.create_run(loaded)
        out(as_dict(queued), f"queued: {queued.id}; `sextet watch {queued.id}` follows it", as_json)
        return
    sys.exit(play(loaded, threads, as_json))


@app.command()
def demo(
    overrides: Overrides = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads each process started here computes with.")] = 1,
    as_json: Json = False,
) -> None:
    """Makes a small model and a small task on the spot, and teaches the model the task by PPO on six services."""
    if not (DEMO / "demo" / "make_model.py").exists():
        raise ConfigError(f"the demo needs a checkout of the repository: {DEMO / 'demo'} is not there")
    tell("making the demo's model and data in models/demo (a few seconds)")
    make = [sys.executable, str(DEMO / "demo" / "make_model.py"), "models/demo"]
    # Away from the terminal's Ctrl-C, which would have it print a traceback, and yet ended with us.
    subprocess.run(
        [sys.executable, "-m", "shared.rpc.lifetime", *make],
        env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
        start_new_session=True,
        check=True,
    )
    sys.exit(play(load_config(DEMO / "demo.yaml", overrides or ()), threads, as_json))


@app.command()
def runs(as_json: Json = False) -> None:
    """Lists all runs, the newest first."""
    with Client() as client:
        found = client.list_runs()
    table = Table(Column("id", no_wrap=True), "name", "state", "step", "of", "reward", "reason")
    for each in found:
        reward = f"{each.metrics['reward']:.3f}" if "reward" in each.metrics else ""
        table.add_row(each.id, each.name, each.state, str(each.step), str(each.total_steps), reward, each.reason)
    out([as_dict(each) for each in found], table, as_json)


@app.command()
def watch(id: RunId, as_json: Json = False) -> None:
    """Follows a run from its beginning until it is over."""
    with Client() as client:
        found = client.get_run(id)
        progress = Progress(found.id, found.name, found.total_steps)
        follow(client, progress, as_json)
        sys.exit(finish(client, progress, as_json))


@app.command()
def pause(id: RunId, as_json: Json = False) -> None:
    """Pauses a run after the step in progress."""
    change(lambda client: client.pause(id), as_json)


@app.command()
def resume(id: RunId, as_json: Json = False) -> None:
    """Goes on with a paused run, or with a failed one from its last checkpoint."""
    change(lambda client: client.resume(id), as_json)


@app.command()
def cancel(id: RunId, as_json: Json = False) -> None:
    """Ends a run now."""
    change(lambda client: client.cancel(id), as_json)


@app.command()
def checkpoint(id: RunId, as_json: Json = False) -> None:
    """Saves a checkpoint after the step in progress."""
    with Client() as client:
        directory, step = client.checkpoint(id)
    out({"directory": directory, "step": step}, f"step {step}: {directory}", as_json)


@app.command()
def profile(
    id: RunId,
    role: Annotated[str, typer.Option(help="actor, critic or reference.")] = "actor",
    steps: Annotated[int, typer.Option(help="Steps to record, at most 10.")] = 1,
    as_json: Json = False,
) -> None:
    """Records a role's work in the next step with PyTorch's profiler: a trace of each rank, and where its time went."""
    with Client() as client:
        calls = client.profile(id, role, steps)
    out([as_dict(each) for each in calls], profile_report(calls), as_json)
    paths = [rank.path for each in calls for rank in each.ranks if rank.path]
    if paths:
        tell(f"traces in {Path(paths[0]).parent}; ui.perfetto.dev or chrome://tracing shows them")


@app.command()
def services(as_json: Json = False) -> None:
    """Lists the registered services."""
    with Client() as client:
        found = client.services()
    heads = ["role", "replica", "state", "run", "version", "running", "device", "endpoint", "metrics"]
    table = Table(*(Column(head, no_wrap=head in ("replica", "endpoint")) for head in heads))
    for each in found:
        version = str(each.version) if each.version >= 0 else ""
        facts = each.facts.get("fault") or each.facts.get("weights") or each.facts.get("metrics", "")
        shown = each.role, each.replica, each.state, each.run, version, str(each.running), place(each)
        table.add_row(*shown, each.endpoint, facts)
    out([as_dict(each) for each in found], table, as_json)


@app.command()
def scale(
    role: Annotated[str, typer.Argument(help=", ".join(ROLES), autocompletion=complete_role)],
    replicas: Annotated[int, typer.Argument(min=0, help="Replicas wanted.")],
    at_once: Annotated[bool, typer.Option("--at-once", help="Do not wait until they are listed.")] = False,
    as_json: Json = False,
) -> None:
    """Brings the number of a role's replicas to N and answers when so many are there; leaving ones finish first."""
    with Client() as client:
        before, wanted = client.scale(role, replicas, at_once)
    out({"role": role, "before": before, "replicas": wanted}, f"{role}: {before} -> {wanted}", as_json)


@app.command()
def certs(
    dir: Annotated[Path, typer.Option(help="Where they go; SEXTET_TLS_DIR then names it.")] = Path("certs"),
    hosts: Annotated[
        list[str] | None, typer.Option(help="Further names and addresses of HTTPS; may be repeated.")
    ] = None,
    renew: Annotated[bool, typer.Option("--renew", help="Replaces all certificates but the CA.")] = False,
    as_json: Json = False,
) -> None:
    """Makes a CA and certificates for mutual TLS: one for each role and one for the client. Existing ones are kept."""
    # Only here: its cryptography takes a tenth of a second to import.
    from sextet.certs import make_certificates

    made = make_certificates(dir, hosts or (), renew=renew)
    table = Table("role", "file", "valid until (UTC)", "")
    for each in made:
        table.add_row(each.role, str(each.file), f"{each.expires:%Y-%m-%d %H:%M}", "made" if each.made else "kept")
    content = [{"role": e.role, "file": str(e.file), "expires": e.expires.isoformat(), "made": e.made} for e in made]
    out(content, table, as_json)
    tell(f"keep {dir}/ca-key.pem to yourself; use them with SEXTET_TLS_DIR={dir} (see docs/security.md)")


@app.command()
def openai(
    port: Annotated[int, typer.Option(help="0 picks a free one.")] = 8000,
) -> None:
    """Serves the policy in training as OpenAI's API (model "policy"), on one URL; stays, Ctrl-C ends it."""
    state = read_state()
    if state is not None and state.ready:
        # Not as an argument: the URL holds a password, and command lines are public.
        os.environ["SEXTET_REDIS_URL"] = state.redis_url
    elif not os.environ.get("SEXTET_REDIS_URL"):
        raise Unavailable("no services run in this directory: start them with `sextet up`, or set SEXTET_REDIS_URL")
    tell(f"http://127.0.0.1:{port or '(see the log)'}/v1, the API key is the token (SEXTET_TOKEN or ~/.sextet/token)")
    os.execv(sys.executable, [sys.executable, "-m", "services.gateway", "--http", f"127.0.0.1:{port}"])


def check_devices(devices: Sequence[str]) -> None:
    """Before anything is started. Raises ConfigError."""
    try:
        parse_devices(devices, ROLES, os.environ)
    except ConfigError as error:
        raise ConfigError(f"--devices (SEXTET_DEVICES): {error}") from None


def play(config: RunConfig, threads: int | None, as_json: bool) -> int:
    """Creates a run on whatever services there are, and shows it to its end."""
    if config.algorithm.preset:
        tell(describe_preset(config.algorithm.preset, config.model_dump()))
    id = run_id()
    progress = Progress(id, config.name, config.total_steps or 0)
    with services_for_run({"rollout": config.rollout.replicas}, tell, threads) as client:
        try:
            created = client.create_run(config, id=id)
            for other in client.list_runs():
                if other.id != id and other.state in ("queued", "running"):
                    tell(f"run {other.id} ({other.name}) goes first; `sextet cancel {other.id}` drops it")
            tell(f"run {created.id}: {created.directory}")
            follow(client, progress, as_json)
            return finish(client, progress, as_json)
        except (KeyboardInterrupt, SystemExit):
            if progress.state not in OVER:
                tell(f"cancelling run {id}")
                with contextlib.suppress(SextetError):
                    client.cancel(id)
            raise


def follow(client: Client, progress: Progress, as_json: bool) -> None:
    """Shows a run's events until it is over."""
    if as_json:
        for event in client.watch(progress.id):
            progress.feed(event)
            print(json.dumps(as_dict(event)), flush=True)
        return
    with screen(client, progress) as shown:
        for event in client.watch(progress.id):
            shown.show(event)


def finish(client: Client, progress: Progress, as_json: bool) -> int:
    """The closing summary of a run that is over; returns the exit code."""
    ended = client.get_run(progress.id)
    directory = Path(ended.directory)
    left = places(progress, directory, logs=STATE_DIR.absolute() / "logs")
    if directory.is_dir() and (drawn := picture(progress, directory / "reward.png")):
        left["picture"] = str(drawn)
    if as_json:
        print(json.dumps({"run": as_dict(ended), "paths": left}), flush=True)
    elif progress.steps:
        console.print(summary(progress))
        for name, path in left.items():
            tell(f"{name:<11} {path}")
    if ended.state == "done":
        return 0
    tell(f"sextet: run {ended.id} {ended.state}{': ' if ended.reason else ''}{ended.reason}", style="red")
    return EXIT_FAILED


def change(action: Callable[[Client], pb.Run], as_json: bool) -> None:
    with Client() as client:
        changed = action(client)
    out(as_dict(changed), f"run {changed.id} is {changed.state}, step {changed.step}", as_json)


def out(content: Any, text: Any, as_json: bool) -> None:
    """JSON for programs or text for people, on stdout."""
    if as_json:
        print(json.dumps(content, indent=1))
    elif isinstance(text, str):
        print(text)
    else:
        # A pipe has no width of its own: what is read by a program must not be cut.
        Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(text)


def as_dict(message: Any) -> dict[str, Any]:
    """A message as plain JSON; 64-bit integers stay numbers, and a run's configuration is a tree."""
    fields = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    fields = {name: getattr(message, name) if isinstance(value, str) else value for name, value in fields.items()}
    if "config_json" in fields:
        fields["config"] = json.loads(fields.pop("config_json"))
    return fields


def run_command() -> int:
    """Runs a command and answers its exit code; what a user can cause ends in one line, never in a traceback."""
    signal.signal(signal.SIGTERM, _terminated)
    try:
        app()
        code = 0
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except (ConfigError, TokenError, TlsError, *REFUSALS) as error:
        code = complain(error, EXIT_USAGE)
    except LocalError as error:
        code = complain(error, error.exit_code)
    except (Unavailable, DeadlineExceeded, Unauthenticated) as error:
        code = complain(error, EXIT_UNREACHABLE)
    except (SextetError, subprocess.CalledProcessError) as error:
        code = complain(error, EXIT_FAILED)
    return code


def place(service: pb.ServiceInfo) -> str:
    """On which devices a replica computes, and which GPUs its processes count them among."""
    gpus = service.facts.get("gpus") if service.role in ROLES else None
    return " ".join(filter(None, (service.facts.get("device"), gpus and f"(GPUs {gpus})")))


def page(http: str) -> str:
    """URL of the HTTP API's description."""
    return f"{'https' if load_tls('client') else 'http'}://{http}/docs"


def complain(error: Exception, code: int) -> int:
    tell(f"sextet: {error}", style="red")
    return code


def _terminated(number: int, frame: object) -> NoReturn:
    # As an exception, so that `finally` and `with` end what was started.
    sys.exit(128 + number)
