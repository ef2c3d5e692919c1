"""The authority's key lies in a file of its own, mode 0600."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from dtfm.coordinator.service.authority_key import authority_file, authority_key
from dtfm.coordinator.store.store import Store
from tests.coordinator.stores import store_url


def test_the_key_is_beside_an_sqlite_store_and_otherwise_in_the_users_state_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert authority_file("sqlite:////runs/dtfm.db", "id") == Path("/runs/dtfm.authority.pem")
    assert authority_file("sqlite:///store", "id") == Path("store.authority.pem")
    assert authority_file("sqlite:///runs/llama.v1", "id") == Path("runs/llama.v1.authority.pem")
    assert authority_file("postgresql://host/runs", "id") == tmp_path / "dtfm" / "authorities" / "id.pem"
    assert authority_file("sqlite://", "id") == tmp_path / "dtfm" / "authorities" / "id.pem"


@pytest.mark.usefixtures("in_sqlite")
def test_it_is_made_once_for_its_owner_alone_and_is_not_in_the_store(tmp_path: Path) -> None:
    path = tmp_path / "dtfm.authority.pem"
    with Store(store_url(tmp_path), write=True):
        key = authority_key(path)
        assert authority_key(path) == key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    stored = [file for file in tmp_path.iterdir() if file != path]
    assert stored
    assert not any(key.splitlines()[1] in file.read_bytes() for file in stored)


def test_a_file_that_others_may_read_or_that_holds_no_key_is_refused_with_the_fix(tmp_path: Path) -> None:
    path = tmp_path / "dtfm.authority.pem"
    authority_key(path)
    path.chmod(0o644)
    with pytest.raises(ValueError, match=f"chmod 600 {path}"):
        authority_key(path)
    path.write_text("no key")
    path.chmod(0o600)
    with pytest.raises(ValueError, match=r"holds no P-256 private key .* --authority"):
        authority_key(path)
