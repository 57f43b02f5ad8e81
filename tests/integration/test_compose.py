"""docker compose, with a real engine: healthy, a run, three rollouts, an external grader by one variable.

`../shared/docker/with-docker make test ARGS="-m docker"`, or with DOCKER_HOST set; $BUILD_OVERRIDE may name a further
compose file for the builds. Takes minutes: images with torch are built.
"""

import json
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GRADER = """
services:
  grader:
    image: sextet-reward
    entrypoint: ["python", "examples/rewards/python_server.py"]
    command: ["0.0.0.0:50060"]
    volumes: ["./examples:/app/examples:ro"]
"""

pytestmark = [
    pytest.mark.docker,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(not os.environ.get("DOCKER_HOST") or not shutil.which("docker"), reason="no Docker engine"),
]


@pytest.fixture(scope="module")
def compose(tmp_path_factory):
    grader = tmp_path_factory.mktemp("compose") / "grader.yml"
    grader.write_text(GRADER)
    override = os.environ.get("BUILD_OVERRIDE")
    files = ["-f", "docker-compose.yml", "-f", "deploy/docker/scale.yml"]
    files += ["-f", override] if override and Path(override).exists() else []
    engine = os.environ["DOCKER_HOST"].removeprefix("unix://")
    if not Path(engine).is_socket():
        pytest.skip("the engine's socket is on another machine")
    project = f"sextet-test-{uuid.uuid4().hex[:6]}"
    # One image at a time: with the classic builder they would all install the same packages side by side.
    ports = {"SEXTET_GRPC_PORT": "0", "SEXTET_HTTP_PORT": "0", "SEXTET_OPENAI_PORT": "0", "COMPOSE_PARALLEL_LIMIT": "1"}
    ports |= {"DOCKER_SOCKET": engine, "DOCKER_GID": str(Path(engine).stat().st_gid)}

    def call(*arguments, more=(), environment=None, timeout=1500):
        command = ["docker", "compose", "-p", project, "--project-directory", str(ROOT), *files, *more, *arguments]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | ports | (environment or {}),
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    call.grader = ["-f", str(grader)]
    call.sextet = lambda *arguments: call("exec", "-T", "controller", "sextet", *arguments, timeout=600)
    subprocess.run(
        [sys.executable, ROOT / "examples/demo/make_model.py", ROOT / "models/demo"], check=True, timeout=300
    )
    if not list((ROOT / "deploy/wheelhouse").glob("torch-*.whl")):
        # The build of torch that this machine's pip chooses, not the one that a container's would.
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", ROOT / "deploy/wheelhouse"]
        subprocess.run([*download, "torch==2.13.0"], check=True, timeout=900)
    try:
        call("build")
        call("up", "-d", "--wait", "--wait-timeout", "240")
        yield call
    finally:
        call("down", "--volumes", "--remove-orphans", more=call.grader)


def test_a_run_in_containers(compose):
    events = [
        json.loads(line) for line in compose.sextet("run", "examples/demo.yaml", "total_steps=2", "--json").splitlines()
    ]
    assert [event["step"] for event in events if event.get("kind") == "step"] == [1, 2]


def test_sextet_scale_adds_and_removes_containers_of_the_project(compose):
    def rollouts():
        listed = compose("ps", "--format", "json", "rollout").splitlines()
        return sorted(each["Name"].rpartition("-")[2] for each in map(json.loads, listed) if each["State"] == "running")

    def registered():
        services = json.loads(compose.sextet("services", "--json"))
        return [each for each in services if each["role"] == "rollout" and each["state"] != "draining"]

    assert json.loads(compose.sextet("scale", "rollout", "3", "--json"))["before"] == 1
    assert (rollouts(), len(registered())) == (["1", "2", "3"], 3)
    compose.sextet("run", "examples/demo.yaml", "total_steps=1", "--json")
    assert any(each["role"] == "gateway" for each in json.loads(compose.sextet("services", "--json")))
    assert json.loads(compose.sextet("scale", "rollout", "1", "--json"))["before"] == 3
    assert (rollouts(), len(registered())) == (["1"], 1)


def test_scaled_rollouts_are_seen_by_the_pool(compose):
    compose("up", "-d", "--wait", "--no-recreate", "--scale", "rollout=3")
    services = json.loads(compose.sextet("services", "--json"))
    listed = services["services"] if isinstance(services, dict) else services
    assert sum(service["role"] == "rollout" for service in listed) == 3


def test_services_run_without_root_and_the_controller_without_torch(compose):
    assert compose("exec", "-T", "actor", "id", "-u").strip() != "0"
    assert compose("exec", "-T", "controller", "sh", "-c", "python -c 'import torch' 2>&1 || echo none").endswith(
        "none\n"
    )


def test_an_external_grader_by_one_variable(compose):
    compose("up", "-d", "--wait", "grader", more=compose.grader)
    compose("up", "-d", "--wait", "reward", environment={"SEXTET_REWARD_ENDPOINT": "grader:50060"})
    compose.sextet("run", "examples/demo.yaml", "total_steps=1", "--json")
    compose("stop", "-t", "1", "grader", more=compose.grader)
    with pytest.raises(AssertionError, match="grader:50060"):
        compose.sextet("run", "examples/demo.yaml", "total_steps=1")


def test_all_roles_under_mutual_tls_by_one_variable(compose):
    tls = {"SEXTET_TLS_DIR": "/run/sextet/certs"}
    compose("up", "-d", "--wait", "--wait-timeout", "240", environment=tls)
    services = {each["role"] for each in json.loads(compose.sextet("services", "--json"))}
    assert services >= {"actor", "critic", "gateway", "reference", "reward", "rollout"}
    events = [
        json.loads(line) for line in compose.sextet("run", "examples/demo.yaml", "total_steps=2", "--json").splitlines()
    ]
    assert [event["step"] for event in events if event.get("kind") == "step"] == [1, 2]
    # Whoever has the token, but no certificate, is not spoken to.
    plain = ("exec", "-T", "-e", "SEXTET_TLS_DIR=", "controller", "sextet", "services")
    with pytest.raises(AssertionError, match="it speaks TLS and this process has no certificate"):
        compose(*plain, timeout=120)
