"""The log says when a member has earned another standing, and the views show it: `core/trust/auditing.py`."""

from __future__ import annotations

from rich.console import Console

from dtfm.coordinator.command.observe import _member_line
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.view.members import member_documents
from dtfm.coordinator.view.watch import render
from tests.coordinator.script import training
from tests.coordinator.strangers import audited, strangers


def test_the_log_says_once_when_a_standing_changes_and_of_all_nodes_of_the_machine() -> None:
    world = strangers("a", "b", "c")
    world.belong_together("a", "b")
    assert audited(world, "a", True, True) == []
    why = "3 audits in a row, the last at step 1"
    assert audited(world, "a", True) == [ev.StandingChanged(node, "proven", why) for node in ("a", "b")]
    assert audited(world, "a", True) == []
    assert audited(world, "b", False) == [], "its word against another's takes nothing away"


def test_members_and_watch_show_what_a_stranger_has_earned() -> None:
    world = strangers("a", "b", "c")
    audited(world, "a", True, True, True)
    shown = {document["node"]: document for document in member_documents(world.view)}
    assert shown["a"]["standing"] == {"word": "proven", "reason": "3 audits in a row, the last at step 1", "audits": 3}
    assert _member_line(shown["a"]).endswith("; proven: 3 audits in a row, the last at step 1")
    assert _member_line(shown["b"]).endswith("; new: no audit of its work yet")
    view = world.view
    with (console := Console(width=120)).capture() as captured:
        console.print(render(view, console))
    assert "stage 0, proven" in captured.get()
    assert "a is proven: 3 audits in a row, the last at step 1" in captured.get()


def test_where_members_know_each_other_nothing_is_said_of_their_standing() -> None:
    world = training("a", "b")
    (shown, _) = member_documents(world.view)
    assert shown["standing"]["word"] == "proven"
    assert "proven" not in _member_line(shown)
