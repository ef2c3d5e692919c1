"""Steps and held-out losses."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from dtfm.coordinator.log.health import after_a_commit
from dtfm.coordinator.log.outer import Looked, outer_step_of
from dtfm.coordinator.log.spread import Spread, noise_of
from dtfm.coordinator.log.wording import MOST_NAMED, Remark, name_first, seconds_in_words
from dtfm.protos.clipping import clip_coefficient
from dtfm.protos.outer import OuterStep
from dtfm.protos.printable import escaped
from dtfm.protos.texts import MOST_PROMPTS

if TYPE_CHECKING:
    from dtfm.coordinator.log.ledger import Ledger
    from dtfm.coordinator.log.training import Training
    from dtfm.scheduler.model.plan import Plan

NODE_LEFT = "NODE_LEFT"
"""StepAborted.problem when a node of the plan left. The step itself is not at fault."""

PEER_LOST = "PEER_LOST"
"""StepAborted.problem when a node could not reach a peer. The link is at fault, not the step."""

OVERDUE = "OVERDUE"
"""StepAborted.problem when votes did not come in time."""

SETTLED = "SETTLED"
"""StepAborted.problem when votes or audits contradicted each other: a node is quarantined for that, or the two are kept apart."""

SLOW_LINE = "SLOW_LINE"
"""StepAborted.problem when a line became so slow that another plan is faster. That plan resumes with the work done so far."""

UNAUDITED = "UNAUDITED"
"""StepAborted.problem when a node left, or withheld something, while work of the step was being repeated."""

ROLLED_BACK = "ROLLED_BACK"
"""StepAborted.problem when an operator went back to an earlier step."""


@dataclass(frozen=True, slots=True)
class Clip:
    """The factor that multiplies the gradients of the stage with these ``layers`` [first, past_last) of an island."""

    island: int
    layers: tuple[int, int]
    factor: float


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """A step is committed. In an ``exchange`` nothing is trained."""

    step: int
    """The step's number."""
    generation: int
    """The generation of the plan."""
    loss: float
    """The mean over ``samples``. In an exchange: the loss of the step before."""
    tokens: int
    """The number of tokens in the step."""
    gradient_norm: float
    """The whole model's norm, before clipping to the run's norm, with as much of each stage's norm as counts (StageBounded). With
    several islands: the root mean square of ``island_norms``. In an exchange: the norm of all changes since the last exchange."""
    seconds: float
    """The time of the step; if ``resumed``, of the rest."""
    samples: int
    """The number of samples in the step."""
    compute_seconds: dict[str, float]
    """By node. Empty in most steps of a long run (core/step/commits.py)."""
    wait_seconds: dict[str, float]
    """By node. Empty in most steps of a long run."""
    resumed: bool = False
    """Whether an earlier generation did part of the step."""
    learning_rate: float = 0.0
    """The learning rate of the step."""
    island_norms: dict[str, float] = field(default_factory=dict)
    """By island; empty with a single island."""
    exchange: bool = False
    """Whether the islands exchanged their changes in this step."""
    outer: OuterStep | None = None
    """How an exchange applied the sum of the changes. Empty in other steps, and in logs of earlier versions."""
    looked: Looked | None = None
    """What an exchange tried before it chose ``outer``; None: it tried nothing."""
    change_norms: dict[str, float] = field(default_factory=dict)
    """In an exchange, by island, the norm of its own change since the last one. Empty with a single island."""
    event: Literal["step_committed"] = "step_committed"

    @property
    def tokens_per_second(self) -> float | None:
        """None if the time of the whole step is not known."""
        return self.tokens / self.seconds if self.seconds > 0 and not (self.resumed or self.exchange) else None

    @property
    def norms_by_island(self) -> dict[int, float]:
        return {int(island): norm for island, norm in self.island_norms.items()}

    def apply(self, ledger: Ledger) -> Ledger:
        seconds = ledger.training.step_seconds if self.resumed or self.exchange else self.seconds
        timed = self if self.compute_seconds else ledger.training.timed
        plan = ledger.training.plan
        training = replace(
            ledger.training,
            step=self.step,
            last=self,
            optimizer=ledger.optimizer,
            clips=self._clips(ledger, plan) if plan is not None else (),
            bounded=(),
            timed=timed,
            step_seconds=seconds,
            work=ledger.training.work.with_step(self.step, self.seconds),
            writer=None,
            outer=(self.outer or outer_step_of(ledger.run)) if self.exchange else ledger.training.outer,
            looking=ledger.training.looking if self.looked is None else (self.step, self.looked.seconds),
        )
        if plan is not None and self.exchange and self.change_norms and training.debts.all_trained_all(plan):
            training = training.with_spread(self._spread(plan, ledger.training))
        if plan is not None:
            batches, at_rest = training.batches(self.step - 1), training.rounds.at_rest(self.step)
            debts = training.debts.with_step(plan, batches, self.learning_rate, at_rest=at_rest)
            training = replace(training, writer=plan.stages[0].island, debts=debts)
        nodes = plan.nodes if plan is not None else ()
        trust, health = (
            ledger.trust.after_a_commit(self.step, nodes, ledger.party),
            after_a_commit(ledger.health, nodes),
        )
        losses = ledger.losses
        if not self.exchange:
            losses = losses.having("training", losses.training.with_loss(self.step, self.loss))
        return replace(ledger, training=training, trust=trust, losses=losses, health=health)

    def _clips(self, ledger: Ledger, plan: Plan) -> tuple[Clip, ...]:
        """The factors of all stages: an island is clipped by its norm, and a bounded stage by its own norm."""
        norms, most = self.norms_by_island, ledger.optimizer.clip_norm
        of_island = {
            stage.island: clip_coefficient(norms.get(stage.island, self.gradient_norm), most) for stage in plan.stages
        }
        by_itself = {each.stage: clip_coefficient(each.norm, most) for each in ledger.training.bounded}
        return tuple(
            Clip(stage.island, stage.layers, by_itself.get(index, of_island[stage.island]))
            for index, stage in enumerate(plan.stages)
        )

    def narrate(self) -> str:
        if self.exchange:
            exchanged = (
                f"step {self.step}: the islands have exchanged what they learnt, in {seconds_in_words(self.seconds)}"
            )
            return f"{exchanged}{self._choice()}"
        speed = self.tokens_per_second
        rate = f", {speed:,.0f} tokens/s" if speed is not None else ""
        return f"step {self.step}: loss {self.loss:.4f}, gradient norm {self.gradient_norm:.3f}{rate}"

    def _spread(self, plan: Plan, training: Training) -> Spread:
        norms = {int(island): norm for island, norm in self.change_norms.items()}
        return Spread(len(norms), training.rounds.length, noise_of(norms, self.gradient_norm, plan.weights(self.step)))

    def _choice(self) -> str:
        if self.looked is None:
            return ""
        gain, number = max(self.looked.gains), len(self.looked.steps)
        than = (
            f", {gain:.4f} below the last exchange's {self.looked.steps[0]}"
            if gain > 0
            else ", as in the last exchange"
        )
        return f"; of {number} outer steps that were tried on held-out samples, {self.outer} has the least loss{than}"


@dataclass(frozen=True, slots=True)
class StageBounded:
    """One party alone holds this stage, by its ``nodes``, and says a ``norm`` of its gradients above ``most``, the largest that
    counts (core/step/norms.py). The ``usual`` norm counts in its place, and the stage clips its gradients by its own norm alone.
    ``rise``: how many times as large as usual the norms of other stages are. The commit of the step follows."""

    step: int
    generation: int
    stage: int
    nodes: tuple[str, ...]
    norm: float
    most: float
    usual: float
    rise: float
    event: Literal["stage_bounded"] = "stage_bounded"

    def apply(self, ledger: Ledger) -> Ledger:
        training = replace(ledger.training, bounded=(*ledger.training.bounded, self))
        return replace(
            ledger, training=training, trust=ledger.trust.with_bounded(self.step, map(ledger.party, self.nodes))
        )

    def narrate(self) -> str:
        rise = f", as those of other stages have risen {self.rise:.3g} times" if self.rise > 1 else ""
        return (
            f"step {self.step}: {name_first(self.nodes)} alone says the gradient norm of stage {self.stage}, {self.norm:.3g}; "
            f"{self.usual:.3g} is usual{rise}, and up to {self.most:.3g} would count. The step counts {self.usual:.3g}, and the "
            f"stage clips its gradients by itself. Its work is audited next, and plans put another party's node beside "
            f"{name_first(self.nodes)} where they can"
        )


@dataclass(frozen=True, slots=True)
class GradientsClipped(Remark):
    """In an open run, replicas found the gradients of others too large in ``step``, and clipped them before they added them up.
    ``times[one][other]``: the largest piece of the ``other``'s gradients that ``one`` clipped, in multiples of the bound, at most
    1e9."""

    step: int
    generation: int
    times: dict[str, dict[str, float]]
    event: Literal["gradients_clipped"] = "gradients_clipped"

    def narrate(self) -> str:
        told = [item for whose in self.times.values() for item in whose.items()]
        worst = {node: max(times for n, times in told if n == node) for node, _ in told}
        whose = ", ".join(f"{node} ({worst[node]:.3g} times the bound)" for node in sorted(worst)[:MOST_NAMED])
        return f"step {self.step}: gradients were clipped of {whose}"


@dataclass(frozen=True, slots=True)
class StepAborted:
    """``problem`` is the name of the wire's StepProblem, or NODE_LEFT, OVERDUE, SETTLED, SLOW_LINE, UNAUDITED or ROLLED_BACK.
    ``node``: the node that reported it, was lost, waited for, contradicted or could not be audited; or the operator who went
    back."""

    step: int
    generation: int
    problem: str
    node: str
    reason: str
    event: Literal["step_aborted"] = "step_aborted"

    def apply(self, ledger: Ledger) -> Ledger:
        if self.problem in (PEER_LOST, OVERDUE, NODE_LEFT, SLOW_LINE):
            return ledger
        # The error may have reached other nodes' work on the step.
        return replace(ledger, training=replace(ledger.training, counts_from=ledger.training.generation + 1))

    def narrate(self) -> str:
        if self.problem == NODE_LEFT:
            return f"step {self.step} was aborted, as a node left: {self.reason}"
        if self.problem in (ROLLED_BACK, SLOW_LINE):
            return f"step {self.step} was aborted: {self.reason}"
        return f"step {self.step} was aborted: {self.problem} on {self.node}: {self.reason}"


@dataclass(frozen=True, slots=True)
class DigestMismatch(Remark):
    """Nodes hold different state of a stage before ``step``: its replicas, or islands. They suspect each other."""

    step: int
    generation: int
    stage: int
    digests: dict[str, str]
    event: Literal["digest_mismatch"] = "digest_mismatch"

    def narrate(self) -> str:
        return f"step {self.step}: nodes hold different state of what stage {self.stage} trains: {self.digests}"


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The loss over held-out samples, in nats per token, and the loss of a model that knows only token frequencies."""

    step: int
    loss: float
    samples: int
    unigram_entropy: float
    event: Literal["evaluated"] = "evaluated"

    def apply(self, ledger: Ledger) -> Ledger:
        losses = ledger.losses.having("held-out", ledger.losses.held_out.with_loss(self.step, self.loss))
        return replace(ledger, evaluated=self, losses=losses)

    def narrate(self) -> str:
        return (
            f"held-out loss after step {self.step}: {self.loss:.4f} nats per token (token frequencies alone: "
            f"{self.unigram_entropy:.4f})"
        )


@dataclass(frozen=True, slots=True)
class TextWritten:
    """A node has continued a prompt of the run file, with the weights after ``step``. Nobody checks the text."""

    step: int
    node: str
    prompt: str
    text: str
    """In one line, with escape sequences for line breaks and control characters."""
    whole: bool
    """Whether the model has ended the text itself."""
    event: Literal["text_written"] = "text_written"

    def apply(self, ledger: Ledger) -> Ledger:
        others = {prompt: told for prompt, told in ledger.texts.items() if prompt != self.prompt}
        last = [*others.items(), (self.prompt, self)][-MOST_PROMPTS:]
        return replace(ledger, texts=dict(last))

    def narrate(self) -> str:
        end = "" if self.whole else " ..."
        return f'after step {self.step} {self.node} continues "{escaped(self.prompt)}" with "{self.text}{end}"'
