"""What is built from the sources works without them: an sdist, from it a wheel, and from that both programs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from dtfm import __version__
from tests.coordinator.command.test_commands import NETWORK, WORKLOAD

ROOT = Path(__file__).parents[1]
SOURCES = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "constraints.txt",
    "dtfm",
    "coordinator",
    "kernels",
    "node",
    "protos",
    "scheduler",
)


def run(*line: str | Path, at: Path, **environment: str) -> str:
    """What the command prints, in this folder, without this process's import path."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(line, cwd=at, env=kept | environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(kind: str, source: Path, into: Path) -> Path:
    """Builds an sdist or a wheel with the setuptools that is installed here."""
    program = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
    return into / run(sys.executable, "-c", program, into, at=source).splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    clone = folder / "clone"
    clone.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, clone / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, clone / name)
    with tarfile.open(build("sdist", clone, folder)) as sdist:
        sdist.extractall(folder, filter="data")
    return build("wheel", folder / f"dtfm-{__version__}", folder)


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of a new environment with the wheel, which finds its dependencies in this process's environment."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder, at=folder)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", wheel, at=folder)
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", at=folder).strip())
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    for source in (ROOT / "scheduler").rglob("*"):  # what Numba has compiled counts for the same file of the same time
        installed = packages / "dtfm" / source.relative_to(ROOT)
        if source.suffix == ".py":
            shutil.copystat(source, installed)
        elif source.suffix in (".nbi", ".nbc"):
            installed.parent.mkdir(exist_ok=True)
            shutil.copy2(source, installed)
    return folder / "bin"


def test_the_wheel_has_every_file_of_the_packages_and_the_license(wheel: Path) -> None:
    packed = set(zipfile.ZipFile(wheel).namelist())
    files = (path for name in SOURCES[5:] for path in (ROOT / name).rglob("*") if path.is_file())
    packages = (path for path in files if path.name != "README.md")  # a page for those who read the sources
    wanted = {f"dtfm/{path.relative_to(ROOT)}" for path in packages if "__pycache__" not in path.parts}
    assert wanted <= packed
    assert f"dtfm-{__version__}.dist-info/licenses/LICENSE" in packed
    assert zipfile.ZipFile(wheel).read("dtfm/constraints.txt") == (ROOT / "constraints.txt").read_bytes()
    assert all(name.startswith(("dtfm/", f"dtfm-{__version__}.dist-info/")) for name in packed)


@pytest.mark.soak
def test_the_programs_work_outside_of_a_clone(programs: Path, wheel: Path, tmp_path: Path) -> None:
    for program, command in (("dtfm-coordinator", "plan"), ("dtfm-node", "join")):
        assert run(programs / program, "--version", at=tmp_path) == f"dtfm {__version__}\n"
        assert "Usage: " in run(programs / program, command, "--help", at=tmp_path)
    (tmp_path / "n.json").write_text(json.dumps(NETWORK))
    (tmp_path / "w.json").write_text(json.dumps(WORKLOAD))
    files = ("--network", "n.json", "--workload", "w.json")
    assert json.loads(run(programs / "dtfm-coordinator", "plan", *files, "--json", at=tmp_path))["plan"]
    typed = {"_DTFM_COORDINATOR_COMPLETE": "complete_bash", "COMP_WORDS": "dtfm-coordinator ex", "COMP_CWORD": "1"}
    assert run(programs / "dtfm-coordinator", at=tmp_path, **typed).split() == ["expel", "export"]
    program = "from dtfm.installed import install_line; print(install_line('s3'))"
    told = run(programs / "python", "-c", program, at=tmp_path).strip()
    assert told == f"{programs / 'python'} -m pip install 'dtfm[s3] @ {wheel.as_uri()}'"
    line = run(programs / "dtfm-node", "install-line", "--device", "cpu", at=tmp_path).strip()
    assert line.endswith(f"dtfm/constraints.txt 'dtfm[node] @ {wheel.as_uri()}'")
    (named,) = re.findall(r" -c (\S+)", line)
    assert Path(named).read_bytes() == (ROOT / "constraints.txt").read_bytes()


@pytest.mark.soak
def test_the_wheel_trains_and_generates_where_no_clone_is(programs: Path, tmp_path: Path) -> None:
    home = {name: str(tmp_path / name) for name in ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME")}
    said = run(
        programs / "dtfm-coordinator",
        "demo",
        "--nodes",
        "2",
        "--steps",
        "4",
        "--no-page",
        "--json",
        at=tmp_path,
        **home,
    )
    committed = [json.loads(line) for line in said.splitlines() if '"step_committed"' in line]
    assert committed[-1]["step"] == 4
    (model,) = (path.parent for path in tmp_path.rglob("model.safetensors"))
    generate = (programs / "dtfm-node", "generate", model, "--prompt", "def", "--max-tokens", "5")
    assert run(*generate, at=tmp_path, **home).strip()
