"""Health: nodes that do not work for now. It says nothing of guilt. Pairs of nodes whose link does not work are in reach.py."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from dtfm.coordinator.log.wording import seconds_in_words

if TYPE_CHECKING:
    from dtfm.coordinator.log.ledger import Ledger

PLAN_FAILED = "PLAN_FAILED"
"""NodeOutOfUse.problem when a node could not take its part in a plan."""

LONGEST_PAUSE_LEASES = 360.0
"""The longest pause, in leases, before a node or link that does not work is tried again: an hour, with a lease of ten seconds."""

MOST_AILING = 1000
"""The number of nodes whose failures are remembered: the last ones."""


@dataclass(frozen=True, slots=True)
class Ailing:
    """A process of a node that has failed since it last took part in a commit."""

    process: str
    """Its incarnation. Another process of the node begins without failures."""
    why: str
    """The last failure, and what helps: a sentence."""
    problem: str
    """As in StepAborted, or PLAN_FAILED."""
    failures: int
    """In a row."""
    alike: int
    """The number of these failures with this problem since the last commit of the run."""
    commits: int
    """The number of commits of the run before the last failure."""
    out: bool = True
    """Whether plans leave out the node. After it has passed its test they may use it."""


Health = Mapping[str, Ailing]
"""By node."""


@dataclass(frozen=True, slots=True)
class NodeOutOfUse:
    """The node does not work, for this ``reason``. Plans leave it out until it passes a test. ``problem``: as in StepAborted, or
    PLAN_FAILED. ``seconds``: the time until the test, at most."""

    node: str
    problem: str
    reason: str
    seconds: float
    event: Literal["node_out_of_use"] = "node_out_of_use"

    def apply(self, ledger: Ledger) -> Ledger:
        if self.node not in ledger.members:
            return ledger
        process, commits, before = (
            ledger.members[self.node].incarnation,
            ledger.trust.commits,
            ledger.health.get(self.node),
        )
        failures = alike = 1
        if before is not None:
            failures += before.failures
            alike += before.alike if (before.problem, before.commits) == (self.problem, commits) else 0
        now = Ailing(process, self.reason, self.problem, failures, alike, commits)
        others = {node: each for node, each in ledger.health.items() if node != self.node}
        return replace(ledger, health=dict(list({**others, self.node: now}.items())[-MOST_AILING:]))

    def narrate(self) -> str:
        return f"plans do without {self.node}: {self.reason}. It is tested within {seconds_in_words(self.seconds)}"


@dataclass(frozen=True, slots=True)
class NodeTested:
    """The node has computed a sample of the run's layers: plans may use it again."""

    node: str
    event: Literal["node_tested"] = "node_tested"

    def apply(self, ledger: Ledger) -> Ledger:
        if (before := ledger.health.get(self.node)) is None:
            return ledger
        return replace(ledger, health={**ledger.health, self.node: replace(before, out=False)})

    def narrate(self) -> str:
        return f"{self.node} has passed its test: plans may use it again"


def after_a_commit(health: Health, nodes: Collection[str]) -> Health:
    """The health after a commit that ``nodes`` have taken part in: they work."""
    if not health:
        return health
    return {node: each for node, each in health.items() if each.out or node not in nodes}


def without_process(health: Health, node: str, process: str) -> Health:
    """The health after ``process`` of the node has joined. Failures of another process no longer count."""
    before = health.get(node)
    if before is None or before.process == process:
        return health
    return {name: each for name, each in health.items() if name != node}
