"""The user who runs a coordinator is an operator of it without ceremony, and the first nodes get an invitation."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtfm.coordinator.log.events import Revoked
from dtfm.coordinator.log.ledger import Ledger, fold
from dtfm.coordinator.service.first_access import FIRST_SECONDS, first_invitation, local_operator
from dtfm.protos.identity.access import Role, kept
from tests.protos.members import PIN

HERE = ("127.0.0.1:7400",)
NOW = 1_800_000_000.0


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def test_the_key_is_made_once_and_follows_the_address() -> None:
    ledger = fold(local_operator(Ledger(), HERE, PIN))
    (mine,) = kept([Role.OPERATOR])
    assert (mine.addresses, mine.pin, mine.enrolled) == (HERE, PIN, True)
    assert ledger.access.names[mine.name].role == "operator"
    assert local_operator(ledger, ("127.0.0.1:7500",), PIN) == []
    (again,) = kept([Role.OPERATOR])
    assert (again.key, again.addresses) == (mine.key, ("127.0.0.1:7500",))


def test_a_key_that_the_log_does_not_know_is_replaced() -> None:
    ledger = fold(local_operator(Ledger(), HERE, PIN))
    (mine,) = kept([Role.OPERATOR])
    assert len(local_operator(Ledger(), HERE, PIN)) == 1  # a new log under the same authority
    revoked = fold([Revoked(mine.name, (), NOW, "somebody")], ledger)
    (enrolled,) = local_operator(revoked, HERE, PIN)
    assert enrolled.name != mine.name


def test_a_first_invitation_is_made_while_there_is_none_that_is_good() -> None:
    first = first_invitation(Ledger(), NOW, 3)
    assert first is not None
    ledger = fold([first[0]])
    assert first_invitation(ledger, NOW + FIRST_SECONDS - 1, 3) is None
    assert first_invitation(ledger, NOW + FIRST_SECONDS, 3) is not None
    assert first_invitation(fold([Revoked("", (first[0].invitation,), NOW, "somebody")], ledger), NOW, 3) is not None
