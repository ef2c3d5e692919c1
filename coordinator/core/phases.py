"""The phases of training, and which follows which: this table, by which `Transition.enter` begins one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from dtfm.coordinator.core.audits import Audit, Passed
from dtfm.coordinator.core.givers import Givers
from dtfm.coordinator.log.events import Codecs, PlanFailed
from dtfm.protos import control_pb2 as wire


@dataclass(frozen=True, slots=True)
class StateTold:
    """The digest (hex) of a bucket's state, as a node says to have it, and the ``donors`` that it says to have it from; none: it
    has had it since before the plan, or has read or made it."""

    digest: str
    donors: tuple[str, ...] = ()


States = Mapping[str, Mapping[int, StateTold]]
"""By node and bucket, what nodes say of the state that they hold after the last committed step."""


@dataclass(frozen=True, slots=True)
class Gathering:
    """Nothing trains, for this ``reason``: too few nodes are ready, or a plan is being made. ``said``: the sentence of the last
    Waiting; ``waiting``: since when training waits for nodes to return with state."""

    since: float
    reason: str
    said: str = ""
    waiting: float | None = None


@dataclass(frozen=True, slots=True)
class Switching:
    """A plan is adopted. ``awaiting`` are the nodes that do not hold their state yet. By node, ``progress`` is what the others
    have of the next step, and ``codecs`` what they send. ``states``: what they and others hold. ``damaged``: what nodes say is
    wrong with the checkpoint that all read. ``givers``: who was named to each node to have the state."""

    awaiting: frozenset[str]
    deadline: float
    since: float
    progress: Mapping[str, wire.Progress] = field(default_factory=dict)
    codecs: Mapping[str, Codecs] = field(default_factory=dict)
    states: States = field(default_factory=dict)
    damaged: Mapping[str, PlanFailed] = field(default_factory=dict)
    givers: Mapping[str, Givers] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stepping:
    """``resumed``: part of the step was done in an earlier generation. ``commit_by``: all votes are in since ``voted``, and the
    step is committed at the latest then, but for ``audits`` that wait. ``committed_by``: ``commit_by`` of the previous step.
    ``stalled``: at whom it stood when it was last interrupted. ``slow_line``: the line that has become slow in it, from where
    to where, and how many times slower (plan/slow_lines.py); None: none has. ``passed``: by node, the tensors that it voted to
    have sent and got, where work is audited."""

    step: int
    since: float
    deadline: float
    resumed: bool = False
    voted: float = math.inf
    commit_by: float | None = None
    committed_by: float = -math.inf
    stalled: frozenset[str] = frozenset()
    slow_line: tuple[str, str, float] | None = None
    votes: Mapping[str, wire.StepReady] = field(default_factory=dict)
    passed: Mapping[str, Passed] = field(default_factory=dict)
    audits: tuple[Audit, ...] = ()


@dataclass(frozen=True, slots=True)
class Pausing:
    """The last commit paused training: it was the run's last one, or a plan is chosen, or an operator paused the run, or a node
    that nobody can replace wants to leave (``for_leaver``). ``awaiting``: the nodes that have not confirmed that they applied the
    commit, and have been here since it was made. ``applied``: what those say that have, by node."""

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
    # A plan is made; or there is none yet, for another reason.
    Gathering: frozenset({Switching, Gathering}),
    # All nodes are ready for the plan: it goes on with the next step, or with the pause after the last one. One is not: it comes
    # again under the next generation, or another has to be made.
    Switching: frozenset({Stepping, Pausing, Switching, Gathering}),
    # The step is committed, and another follows, or a pause. It is given up: the plan comes again, or another has to be made.
    Stepping: frozenset({Stepping, Pausing, Switching, Gathering}),
    # A plan that was chosen, or the same again; or somebody has left, or an operator has paused the run.
    Pausing: frozenset({Switching, Gathering}),
}
"""By phase, those that may follow it, and why."""
