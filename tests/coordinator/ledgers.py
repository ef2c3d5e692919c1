"""Makes ledgers from only the fields that matter to a test, whichever parts they belong to."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from dtfm.coordinator.log.ledger import Ledger

PARTS = ("reach", "training", "copies", "trust")


def altered(ledger: Ledger, **values: Any) -> Ledger:
    """``ledger`` with these values, by field of the ledger or of one of its PARTS."""
    for name, value in values.items():
        part = next((part for part in PARTS if name in {each.name for each in fields(getattr(ledger, part))}), None)
        changed = {name: value} if part is None else {part: replace(getattr(ledger, part), **{name: value})}
        ledger = replace(ledger, **changed)
    return ledger
