"""Nodes that do not work for now: plans leave them out until they pass a test.

A node that fails stays a member. It is tested after a lease. After each further failure the pause doubles, up to an hour. The
node computes a sample of the run's layers, and measures its links. If the run stands still, a node that has failed once is
tested immediately. Its failures are forgotten after a commit that it takes part in, or when another process of the node joins.
"""

from __future__ import annotations

from dataclasses import replace

from dtfm.coordinator.core.phases import Gathering
from dtfm.coordinator.core.reach import ways
from dtfm.coordinator.core.refusal import shorten
from dtfm.coordinator.core.state.members import Test
from dtfm.coordinator.core.state.session import Admission
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.timeouts import TEST_LEASES, pause_leases
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.log import events as ev
from dtfm.protos import MEASURED_TOGETHER, control_pb2 as wire


def failed(transition: Transition, node: str, problem: str, why: str) -> None:
    """The node has failed, for the reason ``why``. Plans leave it out from now on. ``problem``: as in StepAborted, or
    PLAN_FAILED."""
    ledger = transition.state.ledger
    if node not in ledger.members:
        return
    before = ledger.health.get(node)
    seconds = transition.state.lease * pause_leases(1 if before is None else before.failures + 1)
    transition.emit(ev.NodeOutOfUse(node, problem, shorten(why), seconds))
    members = transition.state.members
    transition.set_members(replace(members, tests={**members.tests, node: Test(transition.now + seconds)}))


def test(transition: Transition) -> None:
    """The rule: has nodes that are out of use tested when that is due. A node that does not answer has failed again."""
    state, now = transition.state, transition.now
    if state.stopped or not (out := [node for node, each in state.ledger.health.items() if each.out]):
        return
    for node in sorted(out):
        session = state.members.sessions.get(node)
        if session is None or session.admission is not Admission.READY or _is_at_work(state, node):
            continue
        ailing = state.ledger.health[node]
        known = state.members.tests.get(node) or Test(now + state.lease * pause_leases(ailing.failures))
        if known.asked is not None and now > known.asked + TEST_LEASES * state.lease:
            failed(transition, node, "TEST_FAILED", f"{_first(ailing.why)}; it did not answer a test of its device")
        elif known.asked is None and (now >= known.due or (ailing.failures == 1 and stands_still(state))):
            _ask(transition, node)
        elif node not in state.members.tests:
            transition.set_members(
                replace(transition.state.members, tests={**transition.state.members.tests, node: known})
            )


def answered(transition: Transition, node: str) -> bool:
    """Whether the node was asked for a test. If it was, it has passed the test by timing its device."""
    known = transition.state.members.tests.get(node)
    if known is None or known.asked is None:
        return False
    tests = {name: each for name, each in transition.state.members.tests.items() if name != node}
    transition.set_members(replace(transition.state.members, tests=tests))
    transition.emit(ev.NodeTested(node))
    return True


def stands_still(state: State) -> bool:
    """Whether nothing trains, and no plan is being made."""
    return isinstance(state.phase, Gathering) and state.planner.asked is None and state.planner.chosen is None


def _is_at_work(state: State, node: str) -> bool:
    plan = state.ledger.training.plan
    return not isinstance(state.phase, Gathering) and plan is not None and node in plan.nodes


def _ask(transition: Transition, node: str) -> None:
    members = transition.state.members
    transition.set_members(replace(members, tests={**members.tests, node: Test(transition.now, asked=transition.now)}))
    transition.send([node], wire.CoordinatorMessage(test=wire.Test()))
    plan = transition.state.ledger.training.plan
    names = [name for name in (plan.nodes if plan is not None else ()) if name != node]
    peers = [session for name in names if (session := members.sessions.get(name)) is not None]
    if peers:
        ways.probe(transition, node, peers[:MEASURED_TOGETHER])


def _first(why: str) -> str:
    return why.split("; it did not answer", 1)[0]
