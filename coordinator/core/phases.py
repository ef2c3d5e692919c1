"""The phases of training, and the table of phases that may follow each. `Transition.enter` begins a phase by this table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from dtfm.coordinator.core.audits import Audit, Passed
from dtfm.coordinator.core.givers import Givers
from dtfm.coordinator.log.events import Codecs, PlanFailed
from dtfm.protos import control_pb2 as wire
from dtfm.protos.outer import OuterStep


@dataclass(frozen=True, slots=True)
class StateTold:
    """The digest (hex) of a bucket's state, as a node reports it. ``donors``: the nodes that it reports to have it from; empty:
    it has had the state since before the plan, or has read or made it."""

    digest: str
    donors: tuple[str, ...] = ()


States = Mapping[str, Mapping[int, StateTold]]
"""By node and bucket, the reported state after the last committed step."""


@dataclass(frozen=True, slots=True)
class Gathering:
    """Nothing trains, for this ``reason``: too few nodes are ready, or a plan is being made. ``said``: the sentence of the last
    Waiting event. ``waiting``: since when training waits for nodes to return with state; None: it does not."""

    since: float
    reason: str
    said: str = ""
    waiting: float | None = None


@dataclass(frozen=True, slots=True)
class Switching:
    """A plan is adopted, and its nodes load their state."""

    awaiting: frozenset[str]
    """The nodes that do not hold their state yet."""
    deadline: float
    """When the plan fails for the nodes that are still awaited."""
    since: float
    """When the phase began."""
    progress: Mapping[str, wire.Progress] = field(default_factory=dict)
    """By ready node, its work on the next step."""
    codecs: Mapping[str, Codecs] = field(default_factory=dict)
    """By ready node, the codecs that it sends with."""
    states: States = field(default_factory=dict)
    """The state that nodes report to hold."""
    damaged: Mapping[str, PlanFailed] = field(default_factory=dict)
    """By node, its report of damage in the checkpoint that all nodes read."""
    givers: Mapping[str, Givers] = field(default_factory=dict)
    """By node, the holders of state that were named to it."""


@dataclass(frozen=True, slots=True)
class Stepping:
    """A step trains."""

    step: int
    """The step's number."""
    since: float
    """When the step began."""
    deadline: float
    """When the step fails for nodes that have not voted."""
    resumed: bool = False
    """Whether an earlier generation has done part of the step."""
    voted: float = math.inf
    """When the last vote came."""
    commit_by: float | None = None
    """When the step is committed at the latest, unless ``audits`` wait; None: not all have voted."""
    committed_by: float = -math.inf
    """``commit_by`` of the previous step."""
    stalled: frozenset[str] = frozenset()
    """The nodes where most micro-batches stood when the step was last interrupted."""
    slow_line: tuple[str, str, float] | None = None
    """A line that has become slow in the step: source, destination, and how many times slower (plan/slow_lines.py). None: no line
    has."""
    look_at: tuple[OuterStep, ...] = ()
    """The outer steps that nodes were told to try; empty: none."""
    votes: Mapping[str, wire.StepReady] = field(default_factory=dict)
    """By node, its vote."""
    passed: Mapping[str, Passed] = field(default_factory=dict)
    """By node, the tensors that it voted to have sent and received; empty if work is not audited."""
    audits: tuple[Audit, ...] = ()
    """The audits that are not decided yet."""


@dataclass(frozen=True, slots=True)
class Pausing:
    """The last commit paused training. It was the run's last, or a plan is chosen, or an operator paused the run, or an
    irreplaceable node wants to leave (``for_leaver``). ``awaiting``: the nodes that have not confirmed the commit, and have been
    connected since it was made. ``applied``: by node, its confirmation."""

    deadline: float
    awaiting: frozenset[str]
    since: float
    for_leaver: bool = False
    applied: Mapping[str, wire.Applied] = field(default_factory=dict)

    @property
    def states(self) -> States:
        return {
            node: {each.bucket: StateTold(each.digest.hex()) for each in said.states}
            for node, said in self.applied.items()
        }


Phase = Gathering | Switching | Stepping | Pausing

FOLLOWS: Mapping[type[Phase], frozenset[type[Phase]]] = {
    # A plan is made; or nothing can be planned yet, for another reason.
    Gathering: frozenset({Switching, Gathering}),
    # All nodes are ready for the plan: the next step follows, or the pause after the last step. If a node is not ready, the same
    # plan follows under the next generation, or another has to be made.
    Switching: frozenset({Stepping, Pausing, Switching, Gathering}),
    # The step is committed, and another step or a pause follows. Or it is given up: the plan comes again, or another is made.
    Stepping: frozenset({Stepping, Pausing, Switching, Gathering}),
    # The chosen plan follows, or the same plan. Or a node has left, or an operator has paused the run.
    Pausing: frozenset({Switching, Gathering}),
}
"""By phase, the phases that may follow it, and why."""
