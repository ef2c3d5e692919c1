"""The images are built, and a coordinator and two nodes train from them by compose: `make docker-test`.

Containers reach no package index in CI, and no registry: the base image is Debian's by mmdebstrap, and the wheels are made
outside. Needs Linux, root, Docker Engine, docker-compose and mmdebstrap, all of which Debian has.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.docker.engine import Engine, engine

ROOT = Path(__file__).parents[2]
NEEDED = ("dockerd", "mmdebstrap", "docker-compose")
MISSING = [program for program in NEEDED if shutil.which(program) is None]
pytestmark = [
    pytest.mark.docker,
    pytest.mark.timeout(2700),
    pytest.mark.skipif(os.geteuid() != 0, reason="Docker Engine needs root"),
    pytest.mark.skipif(
        bool(MISSING), reason=f"apt-get install docker.io docker-compose mmdebstrap; missing: {MISSING}"
    ),
]

BASE = "dtfm-test-base"
POSTGRES, PROMETHEUS = "dtfm-test-postgres", "dtfm-test-prometheus"
MOST_BYTES = {"coordinator": 0.9e9, "node-cpu": 1.9e9, "node": 1.9e9}
"""With the base image; of the target node without CUDA's wheels."""

RUN = """
name = "ten"
[cluster]
stages = [1, 1]
lease = 5
[train]
steps = 10
"""

DATABASE = """set -e; data=/var/lib/postgresql/data; PATH=$(echo /usr/lib/postgresql/*/bin):$PATH; cd /
(umask 077; echo "$POSTGRES_PASSWORD" > password); chown -R postgres password $data
as() { su postgres -s /bin/sh -c "PATH=$PATH; $1"; }
as "initdb -D $data -U $POSTGRES_USER --pwfile=/password --auth=scram-sha-256 --encoding=UTF8 --locale=C"
echo "host all all all scram-sha-256" >> $data/pg_hba.conf
echo "CREATE DATABASE $POSTGRES_USER" | as "postgres --single -D $data postgres"
as "exec postgres -D $data -c listen_addresses=* -c unix_socket_directories="
"""
"""What Docker's image of PostgreSQL does when it starts for the first time."""


@contextlib.contextmanager
def part(name: str) -> Iterator[None]:
    """Says how long it took (with pytest's -s)."""
    began = time.monotonic()
    yield
    print(f"  {name}: {time.monotonic() - began:.0f} s", flush=True)


@pytest.fixture(scope="module")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine with all images."""
    context = tmp_path_factory.mktemp("context")
    print(flush=True)
    with engine() as docker:
        try:
            with part("base image and wheels"):
                copy_source(context)
                base = debian(context / "base.tar", "python3", "python3-venv")
                others = debian(context / "others.tar", "postgresql", "prometheus")
                download_wheels(context / "docker" / "wheels")
                bring(docker, context / "base.tar", base, {BASE: ()})
            with part("PostgreSQL and Prometheus"):
                stored = "--storage.tsdb.path=/prometheus"
                starts = {
                    POSTGRES: ("sh", "-c", DATABASE),
                    PROMETHEUS: ("prometheus", "--config.file=/etc/prometheus/prometheus.yml", stored),
                }
                bring(docker, context / "others.tar", others, starts)
            # CUDA's wheels are gigabytes. All other steps of the target are the same with the CPU's.
            for target, extra in (("coordinator", ""), ("node-cpu", "node"), ("node", "node")):
                with part(f"image {target}"):
                    build(docker, context, target, extra)
        finally:
            shutil.rmtree(context)
        yield docker


def debian(archive: Path, *packages: str) -> subprocess.Popen[bytes]:
    included = f"--include={','.join(packages)}"
    command = ["mmdebstrap", "--quiet", "--variant=minbase", included, "bookworm", str(archive)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)


def bring(docker: Engine, archive: Path, made: subprocess.Popen[bytes], images: Mapping[str, Sequence[str]]) -> None:
    """``images``: by name, what it runs, if anything."""
    assert made.wait(900) == 0
    for image, command in images.items():
        change = ("--change", f"ENTRYPOINT {json.dumps(command)}") if command else ()
        docker.docker("import", *change, str(archive), image, timeout=120)
    archive.unlink()


def copy_source(context: Path) -> None:
    """What a clone has."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # deleted, and not yet committed
            shutil.copy2(ROOT / name, context / name, follow_symlinks=False)


def download_wheels(folder: Path) -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = table["project"]
    extras = project["optional-dependencies"]
    wanted = [*table["build-system"]["requires"], *project["dependencies"], *extras["node"], *extras["postgres"]]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--dest", str(folder)]
    subprocess.run(
        [*pip, "--constraint", str(ROOT / "constraints.txt"), *wanted], check=True, timeout=1200, stderr=subprocess.PIPE
    )


def build(docker: Engine, context: Path, target: str, extra: str) -> None:
    given = {"BASE": BASE, "PIP_NO_INDEX": "1"} | ({"EXTRA": extra} if extra else {})
    arguments = [part for name, value in given.items() for part in ("--build-arg", f"{name}={value}")]
    place = ["--file", str(context / "docker" / "Dockerfile"), "--target", target, "--tag", f"dtfm-{target}"]
    docker.docker("build", "--progress=plain", *arguments, *place, str(context), timeout=1500)


@pytest.mark.parametrize("target", MOST_BYTES)
def test_an_image_is_small_and_its_process_is_not_root(docker: Engine, target: str) -> None:
    (image,) = json.loads(docker.docker("image", "inspect", f"dtfm-{target}"))
    print(f"  dtfm-{target}: {image['Size'] / 1e6:.0f} MB", flush=True)
    assert image["Size"] < MOST_BYTES[target]
    config = image["Config"]
    assert config["User"] == "dtfm"
    assert config["Entrypoint"] == ["dtfm-coordinator" if target == "coordinator" else "dtfm-node"], (
        "no shell is process 1"
    )
    look = "id -u; stat -c %U /var/lib/dtfm /var/cache/dtfm /invitation; ls -A /var/lib/dtfm"
    seen = docker.docker("run", "--rm", "--entrypoint", "sh", f"dtfm-{target}", "-c", look).split()
    assert seen == ["1000", *["dtfm"] * 3]


def test_the_coordinator_s_image_waits_for_no_compiler(docker: Engine) -> None:
    misses = "sum(len(f.stats.cache_misses) for f in compiled_functions())"
    program = f"from dtfm.scheduler.warm_up import *; warm_up(); print({misses})"
    assert docker.docker("run", "--rm", "--entrypoint", "python3", "dtfm-coordinator", "-c", program).strip() == "0"


class Events:
    """The events of a run, as they happen."""

    def __init__(self, docker: Engine, coordinator: str) -> None:
        self._process = docker.follow("exec", coordinator, *["dtfm-coordinator", "events", "--follow", "--json"])
        self._coming: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def until(self, event: str, where: Callable[[dict[str, Any]], bool] = lambda _: True, timeout: float = 400) -> Any:
        """The first such event among those that no earlier call has passed."""
        deadline = time.monotonic() + timeout
        seen: list[str] = []
        while True:
            try:
                found = self._coming.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {event} in {timeout:.0f} s, but {seen}") from None
            assert found is not None, f"the events ended before {event}: {seen}"
            if found["event"] == event and where(found):
                return found
            seen.append(f"{found['event']} {found.get('node', '')} {found.get('reason', '')}")

    def rest(self) -> Iterator[dict[str, Any]]:
        """All that no call has passed, until the events end."""
        return iter(self._coming.get, None)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._coming.put(json.loads(line))
        self._coming.put(None)


def test_compose_trains_while_a_node_is_killed_and_another_stopped(docker: Engine, tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text(RUN)
    project = ["--project-name", "ten", "--file", str(ROOT / "docker" / "compose.yaml")]

    def compose(*arguments: str) -> str:
        return docker.compose(*project, *arguments, DTFM_RUN_FILE=str(run))

    with part("from compose up to the first step"):
        compose("up", "--detach", "--no-build")
        services = ("coordinator", "node-1", "node-2")
        coordinator, first, second = (compose("ps", "--quiet", service).strip() for service in services)
        events = Events(docker, coordinator)
        events.until("step_committed")
    try:
        with part("from a kill to the node's next step"):
            os.kill(int(docker.inspect(first, ".State.Pid")), signal.SIGKILL)
            events.until("node_left", lambda e: e["node"] == "node-1")
            events.until("node_joined", lambda e: e["node"] == "node-1")
            takes_part(events, "node-1")
        assert docker.inspect(first, ".RestartCount") == "1"
        with part("from a stop to the node's next step"):
            docker.docker("stop", "--time", "120", second, timeout=130)
            assert docker.inspect(second, ".State.ExitCode") == "0", "it left in order"
            events.until("node_left", lambda e: e["node"] == "node-2")
            docker.docker("start", second)
            events.until("node_joined", lambda e: e["node"] == "node-2")
            takes_part(events, "node-2")
        with part("to the end of the run"):
            codes = docker.docker("wait", coordinator, first, second, timeout=120).split()
        assert codes == ["0", "0", "0"]
    finally:
        events.close()
        logs = docker.docker("logs", coordinator)
    assert not re.search(r"dtfm1\.", logs), "an invitation in a log"
    look = ("run", "--rm", "--no-deps", "-T", "coordinator")
    stored = ("--store", "sqlite:////var/lib/dtfm/dtfm.db")
    whole = [json.loads(line) for line in compose(*look, "events", *stored, "--json").splitlines()]
    # A kill right after the first step may come before a stage's state is in a second place: then step 1 is done again.
    steps = [e["step"] for e in whole if e["event"] == "step_committed"]
    undone = sum(e["event"] == "rolled_back" for e in whole)
    assert len(steps) == 10 or undone, steps
    assert (sorted(set(steps)), steps[-1]) == (list(range(1, 11)), 10)
    assert "The log is in order" in compose(*look, "check", *stored)
    compose("down", "--volumes")


def test_compose_trains_on_postgresql_and_goes_on_when_the_coordinator_is_killed(
    docker: Engine, tmp_path: Path
) -> None:
    run = tmp_path / "run.toml"
    run.write_text(RUN.replace("steps = 10", "steps = 100_000"))
    files = [part for name in ("compose.yaml", "postgres.yaml") for part in ("--file", str(ROOT / "docker" / name))]

    def compose(*arguments: str) -> str:
        return docker.compose(
            *("--project-name", "reserve", *files, *arguments),
            DTFM_RUN_FILE=str(run),
            DTFM_POSTGRES_IMAGE=POSTGRES,
            DTFM_PROMETHEUS_IMAGE=PROMETHEUS,
        )

    services = ("coordinator", "reserve", "node-1", "node-2")
    with part("from compose up to the first step"):
        compose("up", "--detach", "--no-build", *services, "prometheus")
        coordinator, reserve = (compose("ps", "--quiet", service).strip() for service in services[:2])
        events = Events(docker, coordinator)
        first = events.until("step_committed")
    try:
        with part("until Prometheus sees that a reserve waits"):
            asks(docker, coordinator, "dtfm_reserves == 1")
        with part("from a kill to the reserve's third step"):
            os.kill(int(docker.inspect(coordinator, ".State.Pid")), signal.SIGKILL)
            last = max(e["step"] for e in [first, *events.rest()] if e["event"] == "step_committed")
            asks(docker, reserve, f"dtfm_step > {last + 2}")
        with part("until Prometheus sees that the other one waits now"):
            asks(docker, reserve, f"dtfm_reserves == 1 and on(instance) dtfm_step > {last + 2}")
        with part("until all have ended, as an operator stops the run"):
            docker.docker("exec", reserve, "dtfm-coordinator", "stop")
            containers = [compose("ps", "--all", "--quiet", service).strip() for service in services]
            codes = docker.docker("wait", *containers, timeout=120).split()
        assert codes == ["0"] * 4
    finally:
        events.close()
    stored = ("--store", "postgresql+psycopg://dtfm@postgres/dtfm")
    assert "The log is in order" in compose("run", "--rm", "--no-deps", "-T", "coordinator", "check", *stored)
    compose("down", "--volumes")


ASK = """import json, sys, time, urllib.parse, urllib.request
url = "http://prometheus:9090/api/v1/query?" + urllib.parse.urlencode({"query": sys.argv[1]})
while not json.load(urllib.request.urlopen(url))["data"]["result"]:
    time.sleep(0.5)
"""


def asks(docker: Engine, container: str, expression: str) -> None:
    """Waits until Prometheus finds that this holds."""
    docker.docker("exec", container, "python3", "-c", ASK, expression, timeout=90)


def takes_part(events: Events, node: str) -> None:
    """Waits for a step of a plan with the node in it."""
    plan = events.until("plan_adopted", lambda e: any(node in stage["replicas"] for stage in e["plan"]["stages"]))
    events.until("step_committed", lambda e: e["generation"] >= plan["generation"])
