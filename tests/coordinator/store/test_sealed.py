"""Only the passphrase opens a sealed file, and the content is unchanged: `store/sealed.py`."""

from __future__ import annotations

import pytest

from dtfm.coordinator.store import sealed
from dtfm.coordinator.store.sealed import MAGIC, seal, unseal

WORDS = b"correct horse battery"
PART = 8
TAG = 16


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed, "_COST", 1 << 10)
    monkeypatch.setattr(sealed, "PART_BYTES", PART)


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 5 * PART])
def test_what_was_sealed_opens_with_the_passphrase_alone(size: int) -> None:
    content = bytes(range(size))
    closed = seal(content, WORDS, "a")
    assert unseal(closed, WORDS, "a") == content
    assert size < 2 or content not in closed
    for passphrase, name in ((b"another", "a"), (WORDS, "b")):
        with pytest.raises(ValueError, match="does not open"):
            unseal(closed, passphrase, name)
    assert seal(content, WORDS, "a") != closed


def test_no_part_can_be_changed_left_out_moved_or_taken_from_another() -> None:
    closed, other = [seal(bytes(4 * PART), WORDS, "a") for _ in range(2)]
    head, step = len(MAGIC) + 16, PART + TAG
    parts = [closed[at : at + step] for at in range(head, len(closed), step)]
    for wrong in (
        closed[:head] + b"".join(parts[:-1]),
        closed[:head] + b"".join([parts[1], parts[0], *parts[2:]]),
        closed[:head] + b"".join([*parts, parts[-1]]),
        closed[:head] + other[head:],
        closed[:-1] + bytes([closed[-1] ^ 1]),
        closed[:head],
        closed[:5],
        b"",
    ):
        with pytest.raises(ValueError, match=r"does not open|is no encrypted part"):
            unseal(wrong, WORDS, "a")
