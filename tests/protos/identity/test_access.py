"""What is remembered of coordinators: keys in files of mode 0600, the newest first."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from dtfm.protos.identity.access import Access, Role, keep, kept
from tests.protos.members import PIN, key_of

MINE = Access(("10.0.0.1:7400",), PIN, "a", Role.NODE, key_of("a"), enrolled=True)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "dtfm" / "access"


def test_it_is_remembered_for_its_owner_alone(folder: Path) -> None:
    assert kept(list(Role)) == []
    keep(MINE)
    assert kept(list(Role)) == [MINE]
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    keep(replace(MINE, addresses=("10.0.0.2:7400",)))
    assert [access.addresses for access in kept(list(Role))] == [("10.0.0.2:7400",)]


def test_it_is_found_by_role_by_authority_and_by_name_the_newest_first(folder: Path) -> None:
    other = replace(MINE, pin=bytes(32), name="b", role=Role.OPERATOR)
    keep(other)
    keep(MINE)
    for number, file in enumerate(sorted(folder.iterdir())):  # the first one is of the pin of zeros
        os.utime(file, (number, number))
    assert kept(list(Role)) == [MINE, other]
    assert kept([Role.OPERATOR]) == [other]
    assert kept(list(Role), PIN) == [MINE]
    assert kept(list(Role), name="b") == [other]
    assert kept([Role.VIEWER]) == []


def test_a_damaged_file_or_one_that_others_may_read_is_named_with_the_fix(folder: Path) -> None:
    keep(MINE)
    (file,) = folder.iterdir()
    file.chmod(0o644)
    with pytest.raises(ValueError, match=f"chmod 600 {file}"):
        kept(list(Role))
    file.chmod(0o600)
    for text in (
        "",
        "[]",
        "{}",
        file.read_text().replace("PRIVATE", "PUBLIC"),
        file.read_text().replace("node", "king"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"is damaged .*; remove it, and join again"):
            kept(list(Role))


@pytest.mark.parametrize("name", ["", "../a", "a/b", "a b", "x" * 65])
def test_a_name_cannot_lead_out_of_the_folder(name: str) -> None:
    with pytest.raises(ValueError, match="is no name"):
        keep(replace(MINE, name=name))


def test_the_key_is_not_shown() -> None:
    assert "PRIVATE" not in repr(MINE)
