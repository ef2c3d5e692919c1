"""What docker/ tells people to paste: it can be read, and names only what there is."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import typer
import yaml

import dtfm.coordinator.cli
import dtfm.node.cli

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
FILES = sorted(
    path
    for path in DOCKER.rglob("*")
    if path.is_file() and path.suffix != ".whl" and path.name not in (".gitignore", "Dockerfile.dockerignore")
)
PROGRAMS = {"dtfm-node": dtfm.node.cli.app, "dtfm-coordinator": dtfm.coordinator.cli.app}
SERVICES = (("dtfm-node", "join"), ("dtfm-node", "relay"), ("dtfm-coordinator", "serve"))
COMPOSE_FILE_S_OWN = {"DTFM_RUN_FILE", "DTFM_POSTGRES_IMAGE", "DTFM_POSTGRES_PASSWORD", "DTFM_PROMETHEUS_IMAGE"}


def commands(program: str) -> dict[str, typer.core.TyperCommand]:
    group = typer.main.get_command(PROGRAMS[program])
    assert isinstance(group, typer.core.TyperGroup)
    return group.commands  # type: ignore[return-value]


def variables() -> Iterator[str]:
    for program, name in SERVICES:
        for parameter in commands(program)[name].params:
            if isinstance(parameter.envvar, str):
                yield parameter.envvar
            elif isinstance(parameter, typer.core.TyperOption):
                yield f"DTFM_{str(parameter.name).upper()}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_variable_is_one_that_the_commands_read(path: Path) -> None:
    named = set(re.findall(r"\bDTFM_[A-Z_]+", path.read_text()))
    assert named <= {*variables(), *COMPOSE_FILE_S_OWN}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_command_and_option_is_there(path: Path) -> None:
    for program, command, rest in re.findall(
        r"\b(dtfm-node|dtfm-coordinator) ([a-z][a-z-]*)([^\n`]*)", path.read_text()
    ):
        if command not in commands(program):
            in_a_sentence = path.suffix == ".md" and not re.match(r" *--", rest)
            assert in_a_sentence, f"{program} has no command {command}"
            continue
        there = {option for parameter in commands(program)[command].params for option in parameter.opts}
        assert set(re.findall(r"(?<= )--[a-z-]+", rest)) <= there


def test_what_is_yaml_and_json_can_be_read() -> None:
    read = [yaml.safe_load(path.read_text()) for path in FILES if path.suffix in (".yaml", ".yml")]
    read += [json.loads(path.read_text()) for path in FILES if path.suffix == ".json"]
    assert len(read) == 10
    assert all(isinstance(document, dict) for document in read)


def test_compose_mounts_no_secret_where_others_read_it() -> None:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    for name in ("node-1", "node-2"):
        assert services[name]["environment"]["DTFM_ID"] == name
        assert f"{name}:/var/lib/dtfm" in services[name]["volumes"], "each has a key of its own"
        assert "invitation:/invitation:ro" in services[name]["volumes"]
        assert not any("coordinator" in volume for volume in services[name]["volumes"]), (
            "the authority's key lies there"
        )


def test_the_on_start_script_pins_what_it_installs_but_for_pytorch_and_keeps_its_log_to_itself(tmp_path: Path) -> None:
    makes = 'cp dtfm.whl "$5/dtfm-1-py3-none-any.whl"; echo "$6" > source; exit'
    pip = f'[ "$1" = wheel ] && {{ {makes}; }}; cat "$3" > pinned; echo "$4" > wanted'
    with zipfile.ZipFile(tmp_path / "dtfm.whl", "w") as wheel:
        wheel.write(ROOT / "constraints.txt", "dtfm/constraints.txt")
    for program, does in (("pip", pip), ("dtfm-node", 'echo "$1"')):
        (tmp_path / program).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / program).chmod(0o700)
    script = (DOCKER / "vast-onstart.sh").read_text().replace("/var/log/", f"{tmp_path}/")
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    given = {"PATH": path, "SOURCE": "https://example.org/dtfm.whl"}
    subprocess.run(["bash", "-c", f"{script}\nwait"], cwd=tmp_path, env=given, check=True, timeout=60)
    pinned = (tmp_path / "pinned").read_text().splitlines()
    named = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("torch==")]
    assert pinned == [*named, f"torch=={torch.__version__}"]
    assert (tmp_path / "source").read_text() == "https://example.org/dtfm.whl\n"
    assert re.fullmatch(r"dtfm\[gpu\] @ file:///\S+/dtfm-1-py3-none-any\.whl\n", (tmp_path / "wanted").read_text())
    log = tmp_path / "dtfm-node.log"
    assert (log.read_text(), log.stat().st_mode & 0o777) == ("join\n", 0o600)


def test_the_on_start_script_asks_for_what_it_is_to_install(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", DOCKER / "vast-onstart.sh"], cwd=tmp_path, text=True, capture_output=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert "Give -e SOURCE=URL" in done.stderr


def test_the_templates_leave_one_thing_to_be_filled_in(tmp_path: Path) -> None:
    for name in ("Makefile", "docker"):
        (tmp_path / name).symlink_to(ROOT / name)
    make = ("make", "templates", "IMAGE=registry.example/me/dtfm-node:1", "SOURCE=https://example.org/dtfm.whl")
    subprocess.run(make, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    made = {path.name: path.read_text() for path in (tmp_path / "dist" / "templates").iterdir()}
    assert set(made) == {"vast-onstart.sh", "runpod.json", "skypilot.yaml", "node.dstack.yml"}
    for name, text in made.items():
        assert "YOUR" not in text
        assert f"docker/{name}" not in text
        wanted = (
            "SOURCE=${SOURCE:-https://example.org/dtfm.whl}"
            if name.endswith(".sh")
            else "registry.example/me/dtfm-node:1"
        )
        assert wanted in text


def test_the_units_are_what_systemd_reads(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is missing (apt-get install systemd)")
    for unit in (DOCKER / "systemd").iterdir():
        # The programs are not installed where the units expect them.
        there = re.sub(r"(?<=ExecStart=)/opt/dtfm/bin/\S+", sys.executable, unit.read_text())
        (tmp_path / unit.name).write_text(there)
    units = [str(unit) for unit in tmp_path.iterdir()]
    checked = subprocess.run(
        ["systemd-analyze", "verify", *units], capture_output=True, text=True, timeout=60, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")
