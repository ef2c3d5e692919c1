"""Curves at trackers, as people ask for them: ``events --to``, and ``[track]`` of a run file that ``serve`` is given."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from dtfm.coordinator.store.store import Store
from tests.coordinator.command.typed import Typed
from tests.coordinator.stores import store_url
from tests.coordinator.track.curves import in_tensorboard
from tests.coordinator.web.stored_run import finished_run, write


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    url = store_url(tmp_path)
    with Store(url, write=True) as opened:
        write(opened, finished_run(), time.time() - 4000)
    return url


def test_the_curves_of_a_finished_run_are_written_once(store: str, typed: Typed, tmp_path: Path) -> None:
    to = f"tensorboard:{tmp_path}/curves"
    assert typed("events", "--store", store, "--to", to) == f"{to}: 240 more steps and 4 more evaluations\n"
    assert [step for step, _ in in_tensorboard(tmp_path / "curves")["loss"]] == list(range(1, 241))
    told = json.loads(typed("events", "--store", store, "--to", to, "--json"))
    assert told == {"tracker": to, "steps": 0, "evaluations": 0}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--to", "mlflow:x"], "--to names no tracker that is known: 'mlflow:x'; give \"tensorboard:DIR\", "),
        (["--to", "tensorboard:/proc/x"], "/proc/x cannot be written (No such file or directory); make room, "),
        (["--to", "tensorboard:x", "--after", "3"], "--after says which events are printed, and --to prints none"),
    ],
)
def test_what_a_person_must_change_is_one_line(options: list[str], problem: str, store: str, typed: Typed) -> None:
    said = typed("events", "--store", store, *options, code=2)
    assert problem in said
    assert said.count("\n") == 1


def test_a_library_that_is_missing_is_named_with_the_line_that_installs_it(
    store: str, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "dtfm.coordinator.track.by_tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    said = typed("events", "--store", store, "--to", "tensorboard:x", code=2)
    assert "x needs a library (" in said
    assert "[tensorboard]" in said.partition("install it with: ")[2]
    assert "-m pip install" in said


def test_serve_begins_no_run_whose_tracker_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: Typed
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken").write_text("a file")
    Path("run.toml").write_text('[track]\nto = ["tensorboard:taken"]\n')
    said = typed("serve", "run.toml", "--listen", "127.0.0.1:0", "--no-page", code=2)
    assert f"track.to: {tmp_path}/taken cannot be written (File exists); make room" in said
    with Store("sqlite:///dtfm.db", write=False) as opened:
        assert opened.last == 0
