"""The plan in force and the progress of training under it; plans that are adopted, begin or fail.

Training belongs to one plan at a time. Members, links and copies belong to the run and are elsewhere. With several islands each
has a `Training` of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from dtfm.coordinator.log.debts import Debts
from dtfm.coordinator.log.spread import REMEMBERED, Spread
from dtfm.coordinator.log.steps import Clip, StageBounded, StepCommitted
from dtfm.coordinator.log.wording import codecs_in_use, describe_codecs, describe_plan, describe_seconds
from dtfm.coordinator.log.work import Work
from dtfm.protos.outer import OuterStep
from dtfm.scheduler.model.plan import Plan
from dtfm.scheduler.model.rounds import NO_ROUNDS, Rounds

if TYPE_CHECKING:
    from dtfm.coordinator.log.ledger import Ledger

Codecs = Mapping[str, Mapping[str, str]]
"""By destination, then by tensors ("activations", "gradients", "reduction"): the codec."""

MOST_LOSSES = 9
"""The number of losses that are remembered."""

Process = tuple[str, str]
"""A node, and its incarnation."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """The optimizer's values that operators may change. ``learning_rate``: the rate of the run file; the schedule makes a step's
    rate of it."""

    learning_rate: float
    clip_norm: float
    weight_decay: float

    @staticmethod
    def of(run: Mapping[str, Any]) -> Optimizer:
        """The values of the run (the run file as JSON)."""
        train = run.get("train", {})
        return Optimizer(*(float(train.get(name, 0)) for name in ("learning_rate", "clip_norm", "weight_decay")))


@dataclass(frozen=True, slots=True)
class Training:
    """A plan in force, its steps, and the holders of the state."""

    generation: int = 0
    """The generation of the last plan."""
    plan: Plan | None = None
    """None: nothing was planned since the coordinator started, or since training went back."""
    counts_from: int = 0
    """The generation since which work on the current step counts."""
    codecs: Mapping[str, Codecs] = field(default_factory=dict)
    """By source."""
    step: int = 0
    """The last committed step."""
    last: StepCommitted | None = None
    """The last commit; None after going back."""
    optimizer: Optimizer | None = None
    """The values that the last step was applied with; None: there is no such step, or training has gone back."""
    clips: tuple[Clip, ...] = ()
    """The factors by which each stage clipped its gradients in the last step; empty: no such step, or training has gone back."""
    bounded: tuple[StageBounded, ...] = ()
    """The stages whose norms count only in part in the commit that follows; empty otherwise."""
    timed: StepCommitted | None = None
    """The last commit with each node's times in the log."""
    step_seconds: float | None = None
    """The time of the last step that began and ended under one plan."""
    work: Work = field(default_factory=Work)
    """How long the steps up to the last one took."""
    predicted: float | None = None
    """Seconds that a step of the plan in force is expected to take; None: not known."""
    bound: float | None = None
    """Seconds per step that no plan can beat; None: not known."""
    overhead: float = 0.0
    """Seconds of each step, under any plan, that the scheduler's model leaves out, as steps have shown."""
    losses: tuple[int, ...] = ()
    """The steps after which the plan in force lost a node, or a node wanted to leave: the last MOST_LOSSES."""
    corrected: int = 0
    """The last step that corrected a device's speed or the overhead for plans. 0: none has."""
    held: tuple[tuple[Process, ...], ...] = ()
    """By layer, the processes that had its state as of ``step`` in memory. They still have it when they return, unless they say
    otherwise."""
    islands: Mapping[str, int] = field(default_factory=dict)
    """By node, the number of the island whose state it holds. Empty: all nodes hold the state of island 0."""
    began: Mapping[int, int] = field(default_factory=dict)
    """By island, the step after which it began with moments of zero; left out: it began with the run."""
    moments: Mapping[int, int] = field(default_factory=dict)
    """By island that begins within a round, the island whose moments it gets. Empty once the plan has begun."""
    writer: int | None = None
    """The island that writes snapshots of the state after ``step``; None: the state was read from a snapshot."""
    outer: OuterStep | None = None
    """How the last exchange applied its sum; None: there was none, or training has gone back."""
    spreads: tuple[Spread, ...] = ()
    """Of the last exchanges between several islands; empty after going back."""
    looking: tuple[int, float] | None = None
    """The last exchange that tried outer steps, and the seconds that this took; None: none has, or training has gone back."""
    all_rounds: tuple[Rounds, ...] = (NO_ROUNDS,)
    """The rounds of all plans until now, in order, without repetitions. The last are in force."""
    debts: Debts = field(default_factory=Debts)
    """The training of islands that were given up."""

    @property
    def rounds(self) -> Rounds:
        return self.all_rounds[-1]

    def trained(self, step: int) -> int:
        """The number of steps up to this step that have trained. ``step`` may be the next step."""
        return self._rounds_at(step).trained(step)

    def batches(self, step: int) -> int:
        """The number of the run file's batches up to this step. ``step`` may be the next step."""
        return self._rounds_at(step).batches(step)

    def progress(self, step: int) -> int:
        """How many of the run file's steps are done after this step. ``step`` may be the next step."""
        return self._rounds_at(step).progress(step)

    def _rounds_at(self, step: int) -> Rounds:
        return next((each for each in reversed(self.all_rounds) if each.since <= step), NO_ROUNDS)

    @property
    def in_force(self) -> Plan:
        """The plan. There must be one."""
        assert self.plan is not None
        return self.plan

    def with_spread(self, spread: Spread) -> Training:
        return replace(self, spreads=(*self.spreads, spread)[-REMEMBERED:])

    def without_holders(self, nodes: Collection[str], layers: Collection[int] | None = None) -> Training:
        """Without the state that these nodes had in memory, of all layers or of some."""
        return replace(
            self,
            held=tuple(
                tuple(who for who in holders if who[0] not in nodes) if layers is None or layer in layers else holders
                for layer, holders in enumerate(self.held)
            ),
        )

    def moments_began(self, island: int) -> int:
        """The step after which the island's moments, as of the last step, began with zero."""
        rounds, began = self.rounds, self.began.get(island, 0)
        return max(began, rounds.rested(self.step - 1)) if rounds.restarts and self.step > rounds.since else began

    def with_loss(self, node: str) -> Training:
        """``node`` has left, or wants to. If a plan loses several nodes after one step, they count once."""
        if self.plan is None or node not in self.plan.nodes or self.step in self.losses[-1:]:
            return self
        return replace(self, losses=(*self.losses, self.step)[-MOST_LOSSES:])

    def back_to(self, step: int, exchanges: int = 0, ahead: int = 0) -> Training:
        """The training after going back: nobody holds the state as of ``step`` in memory, and no work until now counts.
        ``exchanges``, and ``ahead`` as in Rounds: of the steps up to that step, if the step is from another log."""
        known = tuple(rounds for rounds in self.all_rounds if rounds.since <= step)
        return replace(
            self,
            plan=None,
            held=(),
            islands={},
            began={},
            moments={},
            writer=None,
            last=None,
            optimizer=None,
            clips=(),
            outer=None,
            spreads=(),
            looking=None,
            counts_from=self.generation + 1,
            step=step,
            work=self.work.back_to(step),
            all_rounds=(NO_ROUNDS, Rounds(step, before=exchanges, ahead=ahead)) if exchanges else known,
            debts=self.debts.back_to(self.batches(step)),
        )


@dataclass(frozen=True, slots=True)
class PlanAdopted:
    """A plan is adopted. Seconds are None if the planner gives none."""

    generation: int
    """The plan's generation."""
    plan: Plan
    """The plan."""
    reason: str
    """Why it was adopted."""
    step: int
    """The last committed step."""
    predicted_seconds: float | None = None
    """The planner's prediction for a step."""
    lower_bound_seconds: float | None = None
    """The planner's lower bound for a step."""
    counts_from: int = 0
    """Work on the next step still counts if it was done since this generation."""
    moments: dict[int, int] | None = None
    """By island that begins within a round, with the weights of the last exchange: the island whose moments it gets. Other new
    islands begin with moments of zero. None: in logs of earlier versions, where islands counted in exchanges by their shares."""
    event: Literal["plan_adopted"] = "plan_adopted"

    def apply(self, ledger: Ledger) -> Ledger:
        training = ledger.training
        again = training.plan is not None and training.plan.stages == self.plan.stages  # the same plan as before
        if self.predicted_seconds is not None or not again:
            training = replace(training, predicted=self.predicted_seconds, bound=self.lower_bound_seconds)
        training = replace(
            training,
            generation=self.generation,
            plan=self.plan,
            codecs={},
            counts_from=self.counts_from,
            began=self._began(ledger),
            moments=self.moments or {},
            all_rounds=training.all_rounds
            if self.plan.rounds == training.rounds
            else (*training.all_rounds, self.plan.rounds),
            debts=training.debts.with_plan(self.plan),
        )
        return replace(ledger, training=training)

    def _began(self, ledger: Ledger) -> Mapping[int, int]:
        """An island that was whole goes on. An island that gets another's moments began with these. If no state is held, the
        first island goes on from the snapshot."""
        known, first = ledger.copies.agreed.get(self.step), self.plan.stages[0].island
        going_on = {number: ledger.training.moments_began(number) for number in ledger.whole_islands}
        began = {stage.island: self.step for stage in self.plan.stages}
        last = ledger.training.began.get(first, ledger.copies.from_weights)
        began |= going_on or {first: known.began if known is not None else last}
        began |= {island: ledger.training.moments_began(source) for island, source in (self.moments or {}).items()}
        return {number: step for number, step in began.items() if step}

    def narrate(self) -> str:
        expected = describe_seconds(self.predicted_seconds, self.lower_bound_seconds)
        what = f"{describe_plan(self.plan)}{f'; {expected}' if expected else ''}"
        begins = "".join(
            f" Island {island} begins with the weights of the last exchange and the moments of island {source}."
            for island, source in sorted((self.moments or {}).items())
        )
        return f"plan {self.generation} from step {self.step + 1} on: {what}. {self.reason}{begins}"


@dataclass(frozen=True, slots=True)
class PlanRepriced:
    """The plan in force stays, but its steps are expected to take other seconds than before: the planner has looked again, or
    steps have shown it. ``overhead_seconds``: see Training."""

    generation: int
    predicted_seconds: float
    lower_bound_seconds: float | None
    overhead_seconds: float
    reason: str
    event: Literal["plan_repriced"] = "plan_repriced"

    def apply(self, ledger: Ledger) -> Ledger:
        before = ledger.training
        corrected = before.step if self.overhead_seconds != before.overhead else before.corrected
        training = replace(
            before,
            predicted=self.predicted_seconds,
            bound=self.lower_bound_seconds,
            overhead=self.overhead_seconds,
            corrected=corrected,
        )
        return replace(ledger, training=training)

    def narrate(self) -> str:
        expected = describe_seconds(self.predicted_seconds, self.lower_bound_seconds)
        return f"plan {self.generation} stays: {expected}. {self.reason}"


@dataclass(frozen=True, slots=True)
class PlanStarted:
    """Every node of the plan holds its state: ``step`` begins, or goes on, if ``finished`` micro-batches are done in some stage.
    ``codecs`` are by source."""

    generation: int
    step: int
    finished: int = 0
    codecs: Mapping[str, Codecs] = field(default_factory=dict)
    event: Literal["plan_started"] = "plan_started"

    def apply(self, ledger: Ledger) -> Ledger:
        plan, members = ledger.training.in_force, ledger.members
        held = tuple(
            tuple(
                (node, members[node].incarnation)
                for stage in plan.stages
                if layer in range(*stage.layers)
                for node in stage.replicas
            )
            for layer in range(plan.stages[-1].layers[1])
        )
        several = any(stage.island for stage in plan.stages)
        islands = {node: stage.island for stage in plan.stages for node in stage.replicas} if several else {}
        began = {stage.island: step for stage in plan.stages if (step := ledger.training.began.get(stage.island))}
        before, copies, first = ledger.training, ledger.copies, plan.stages[0].island
        writer = before.writer if before.step in {*copies.checkpoints, *copies.on_disks} else first
        training = replace(
            before, held=held, islands=islands, began=began, moments={}, writer=writer, codecs=self.codecs
        )
        trust = replace(ledger.trust, damaged_by=())
        return replace(ledger, training=training, copies=copies.without_others(before.step, first), trust=trust)

    def narrate(self) -> str:
        under = codecs_in_use(self.codecs)
        return f"plan {self.generation} begins with step {self.step}{f'; codecs of links: {under}' if under else ''}"


@dataclass(frozen=True, slots=True)
class CodecsChosen:
    """The node's links have changed, and so have the codecs that it sends with."""

    node: str
    codecs: Codecs
    event: Literal["codecs_chosen"] = "codecs_chosen"

    def apply(self, ledger: Ledger) -> Ledger:
        codecs = {**ledger.training.codecs, self.node: self.codecs}
        return replace(ledger, training=replace(ledger.training, codecs=codecs))

    def narrate(self) -> str:
        sent = [f"to {node} {describe_codecs(tensors)}" for node, tensors in sorted(self.codecs.items())]
        return f"{self.node} now sends {'; '.join(sent) or 'nothing'}"
