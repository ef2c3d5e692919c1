"""What a user is told of the installation works where the user is."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import get_args, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

import dtfm.coordinator.cli
import dtfm.node.cli
from dtfm import __version__, installed

APPS = [dtfm.coordinator.cli.app, dtfm.node.cli.app]


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (None, "pip install 'dtfm[s3]'"),
        ({"url": "file:///a%20b/dtfm", "dir_info": {"editable": True}}, "pip install -e '/a b/dtfm[s3]'"),
        ({"url": "file:///src/dtfm", "dir_info": {}}, "pip install 'dtfm[s3] @ file:///src/dtfm'"),
        ({"url": "file:///dtfm-1.whl", "archive_info": {}}, "pip install 'dtfm[s3] @ file:///dtfm-1.whl'"),
        (
            {"url": "https://h/dtfm.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "pip install 'dtfm[s3] @ git+https://h/dtfm.git@abc'",
        ),
    ],
    ids=["index", "editable", "folder", "wheel", "repository"],
)
def test_more_is_installed_for_the_same_python_from_the_same_source(
    source: dict[str, object] | None, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(read_text={"direct_url.json": json.dumps(source) if source else None}.get)
    monkeypatch.setattr("importlib.metadata.distribution", lambda _: found)
    assert installed.install_line("s3") == f"{sys.executable} -m {line}"
    monkeypatch.setattr("shutil.which", lambda _: "/bin/uv")
    monkeypatch.setattr("importlib.metadata.version", lambda _: "")
    which = f"uv pip install --python {sys.executable} --torch-backend=auto"
    rest = f"-c {installed.CONSTRAINTS} {line.removeprefix('pip install ')}"
    assert installed.torch_line("s3") == f"{which} {rest}"
    assert installed.torch_line("s3", again=True) == f"{which} --reinstall-package torch {rest}"


def test_uv_is_installed_where_it_is_missing_and_one_cupy_gives_way_to_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr("importlib.metadata.version", {"cupy-cuda13x": "14.0"}.__getitem__)
    first, second, third = installed.torch_line("gpu").split(" && ")
    assert first == f"{sys.executable} -m pip install uv"
    assert second == f"{sys.executable} -m uv pip uninstall --python {sys.executable} cupy-cuda13x"
    assert third.startswith(f"{sys.executable} -m uv pip install --python {sys.executable} --torch-backend=auto -c ")


def test_the_versions_that_were_tested_are_those_of_the_clone() -> None:
    assert installed.CONSTRAINTS.read_text() == (Path(__file__).parents[1] / "constraints.txt").read_text()


def test_a_program_is_called_by_its_path_where_the_shell_does_not_find_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("python", "dtfm-node"):
        (tmp_path / "bin" / name).touch(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert installed.program("dtfm-node") == "dtfm-node"
    monkeypatch.setenv("PATH", "/nowhere")
    assert installed.program("dtfm-node") == f"{tmp_path}/bin/dtfm-node"
    monkeypatch.chdir(tmp_path)
    assert installed.program("dtfm-node") == "bin/dtfm-node"
    assert installed.program("another") == "another"


@pytest.mark.parametrize("app", APPS)
def test_each_program_tells_its_version(app: typer.Typer) -> None:
    told = CliRunner().invoke(app, ["--version"])
    assert (told.exit_code, told.stdout) == (0, f"dtfm {__version__}\n")


def test_an_option_has_the_same_kind_of_value_in_every_command() -> None:
    kinds: dict[str, set[object]] = {}
    for command in (command.callback for app in APPS for command in app.registered_commands):
        options = get_type_hints(command, include_extras=True)
        for name, kind in get_type_hints(command).items():
            if any(isinstance(each, typer.models.OptionInfo) for each in get_args(options[name])):
                kinds.setdefault(name, set()).add(next(iter(get_args(kind) if NoneType in get_args(kind) else (kind,))))
    assert {name: kind for name, kind in kinds.items() if len(kind) > 1} == {}


def test_the_many_options_of_join_stand_in_groups() -> None:
    help = CliRunner().invoke(dtfm.node.cli.app, ["join", "--help"]).stdout
    groups = re.findall(r"╭─ (.+?) ─", help)
    assert groups[0] == "Arguments"
    assert len(groups) >= 6


def test_every_command_of_the_coordinator_speaks_json() -> None:
    for command in dtfm.coordinator.cli.app.registered_commands:
        assert {"json_lines", "json"} & get_type_hints(command.callback).keys(), command.callback
