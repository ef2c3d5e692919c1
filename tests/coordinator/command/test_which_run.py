"""Which run a command means that names none: `command/which_run.py`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dtfm.coordinator.command import which_run as module
from dtfm.coordinator.command.which_run import which_run
from dtfm.protos.identity.access import Access, Role, keep
from dtfm.protos.identity.credentials import make_authority, make_key, pin_of
from dtfm.protos.identity.private_files import write_private

DIRECTING = [Role.OPERATOR]
LOOKING = [Role.VIEWER, Role.OPERATOR]


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def remembered(run: str, role: Role = Role.OPERATOR, key: bytes | None = None) -> Access:
    """Of a run whose authority has the ``key``."""
    pin = pin_of(make_authority(key or make_key(), datetime.now(UTC)).certificate)
    access = Access((f"{run}:7400",), pin, f"me-{role}", role, make_key(), enrolled=True, run=run)
    keep(access)
    return access


def up(monkeypatch: pytest.MonkeyPatch, *runs: str) -> None:
    """These coordinators answer."""

    async def answers(run: Access) -> bool:
        return run.run in runs

    monkeypatch.setattr(module, "_answers", answers)


async def test_the_run_of_the_folder_comes_before_all_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = make_key()
    write_private(tmp_path / "here" / "dtfm.authority.pem", key)
    here = remembered("here", key=key)
    newest = remembered("newest")
    up(monkeypatch, "newest")
    assert await which_run(DIRECTING, tmp_path / "here") == here
    assert await which_run(DIRECTING, tmp_path) == newest


@pytest.mark.parametrize(("answering", "meant"), [((), "c"), (("a",), "a")])
async def test_elsewhere_it_is_the_one_that_answers_or_else_the_newest(
    answering: Sequence[str], meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {name: remembered(name) for name in "abc"}
    up(monkeypatch, *answering)
    assert await which_run(DIRECTING, tmp_path) == runs[meant]


async def test_where_several_answer_they_are_listed_and_none_is_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        remembered(name)
    up(monkeypatch, "a", "c")
    with pytest.raises(ValueError, match=r"2 runs are up:\n  1. run 'c' at c:7400\n  2. run 'a' at a:7400\nSay which"):
        await which_run(DIRECTING, tmp_path)


async def test_a_nodes_machine_looks_at_its_run_and_says_who_can_direct_it(tmp_path: Path) -> None:
    node = remembered("far", Role.NODE)
    assert await which_run(LOOKING, tmp_path, or_as_member=True) == node
    with pytest.raises(
        ValueError, match=r"takes part in run 'far' at far:7400 as node 'me-node', and a node cannot direct"
    ):
        await which_run(DIRECTING, tmp_path)


async def test_who_has_a_role_there_uses_it_although_a_node_of_theirs_joined_later(tmp_path: Path) -> None:
    key = make_key()
    operator = remembered("own", key=key)
    remembered("own", Role.NODE, key=key)
    assert await which_run(LOOKING, tmp_path, or_as_member=True) == operator


async def test_who_has_never_been_anywhere_means_no_run(tmp_path: Path) -> None:
    assert await which_run(DIRECTING, tmp_path) is None
