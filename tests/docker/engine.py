"""A Docker Engine of the test's own: in a network namespace of its own, since it changes forwarding rules, with all it has in one
folder, which is gone afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

READY_SECONDS = 60
STOP_SECONDS = 60


class Engine:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environment = {**os.environ, "DOCKER_HOST": f"unix://{folder}/socket", "DOCKER_BUILDKIT": "1"}
        dockerd = shutil.which("dockerd")
        assert dockerd is not None
        self._dockerd = dockerd
        # The client of the same installation: another one on the path may lack its builder.
        beside = Path(dockerd).resolve().parents[1] / "bin" / "docker"
        self._docker = str(beside) if beside.exists() else "docker"
        self._compose = ["docker-compose"] if shutil.which("docker-compose") else [self._docker, "compose"]

    def docker(self, *arguments: str, timeout: float = 60) -> str:
        """What the command prints. Raises AssertionError with all that it says if it fails."""
        return self._run([self._docker, *arguments], timeout, {})

    def compose(self, *arguments: str, timeout: float = 120, **environment: str) -> str:
        return self._run([*self._compose, *arguments], timeout, environment)

    def follow(self, *arguments: str) -> subprocess.Popen[bytes]:
        """A command whose output is read while it runs."""
        return subprocess.Popen(
            [self._docker, *arguments], env=self._environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )

    def inspect(self, container: str, what: str) -> str:
        return self.docker("inspect", "--format", f"{{{{{what}}}}}", container).strip()

    def _run(self, command: list[str], timeout: float, environment: dict[str, str]) -> str:
        ended = subprocess.run(
            command,
            env={**self._environment, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert ended.returncode == 0, f"{' '.join(command)}\n{ended.stdout[-3000:]}\n{ended.stderr[-5000:]}"
        return ended.stdout

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        log = self._folder / "log"
        options = ["--data-root", "data", "--exec-root", "exec", "--pidfile", "pid", "--host", "socket"]
        places = [option if option.startswith("--") else str(self._folder / option) for option in options]
        places[-1] = f"unix://{places[-1]}"
        # Where containerd runs already, dockerd uses that one: what is the test's must not mix with what is the machine's.
        own = f"dtfm-docker-{os.getpid()}"  # not the folder's name: containerd allows no "__" in it
        places += ["--containerd-namespace", own, "--containerd-plugins-namespace", f"{own}-p"]
        with log.open("wb") as output:
            daemon = subprocess.Popen(
                # It ends with this process, even if that is killed.
                [
                    "setpriv",
                    "--pdeathsig",
                    "TERM",
                    "unshare",
                    "--net",
                    "sh",
                    "-c",
                    'ip link set lo up && exec "$@"',
                    "sh",
                    self._dockerd,
                    *places,
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            deadline = time.monotonic() + READY_SECONDS
            while "API listen on" not in log.read_text(errors="replace"):
                alive = daemon.poll() is None and time.monotonic() < deadline
                assert alive, log.read_text(errors="replace")[-3000:]
                time.sleep(0.1)
            yield
        finally:
            self._stop(daemon)

    def _stop(self, daemon: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            if containers := self.docker("ps", "--all", "--quiet").split():
                self.docker("rm", "--force", "--volumes", *containers)
        daemon.terminate()
        try:
            daemon.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait(10)


@contextlib.contextmanager
def engine() -> Iterator[Engine]:
    folder = Path(tempfile.mkdtemp(prefix="dtfm-docker-"))  # a socket's path must be short
    try:
        docker = Engine(folder)
        with docker.running():
            yield docker
    finally:
        for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            if (place := line.split()[1]).startswith(f"{folder}/"):
                subprocess.run(["umount", "--lazy", place], check=False)
        shutil.rmtree(folder)
