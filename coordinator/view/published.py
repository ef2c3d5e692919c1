"""What of events and members is shown outside the coordinator's store."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

from dtfm.coordinator.log.events import NodeJoined, StandbyPromoted
from dtfm.coordinator.log.wording import without_addresses
from dtfm.coordinator.store.record import Record
from dtfm.coordinator.view.story import Story
from dtfm.protos.printable import printable

MOST_CHARACTERS = 400
"""Longer texts are cut: a member may have said them."""


def published(record: Record) -> Record:
    """By an incarnation the coordinator tells a node that reconnects from another process; nobody else needs to know it."""
    match record.event:
        case NodeJoined() | StandbyPromoted():
            return replace(record, event=replace(record.event, incarnation=""))
    return record


def published_story(story: Story) -> Story:
    """``story`` without incarnations."""
    now = story.now
    members = {name: replace(member, incarnation="") for name, member in now.ledger.members.items()}
    ledger = replace(now.ledger, members=members, training=replace(now.ledger.training, held=()))
    return replace(story, now=replace(now, ledger=ledger, recent=deque(map(published, now.recent), now.recent.maxlen)))


def for_members(document: Any) -> Any:
    """The JSON value without IP addresses: a node's key, or a viewer's, shows how the run fares, and not where members are."""
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
