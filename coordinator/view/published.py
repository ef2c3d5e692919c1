"""The parts of events and members that are shown outside the coordinator's store."""

from __future__ import annotations

from typing import Any

from dtfm.coordinator.log.wording import without_addresses
from dtfm.protos.printable import printable

MOST_CHARACTERS = 400
"""Longer texts are cut: a member may have written them."""


def for_members(document: Any) -> Any:
    """The JSON value without IP addresses. A node's key, or a viewer's, shows how the run fares, and not where members are."""
    match document:
        case dict():
            return {key: [] if key == "candidates" else for_members(value) for key, value in document.items()}
        case list():
            return [for_members(value) for value in document]
        case str():
            return without_addresses(document)
    return document


def for_anybody(text: str) -> str:
    """The text as one printable line of bounded length, without IP addresses."""
    hidden = without_addresses(text)
    cut = hidden if len(hidden) <= MOST_CHARACTERS else hidden[: MOST_CHARACTERS - 1] + "…"
    return printable(cut)
