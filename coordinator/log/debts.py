"""The training of islands that were given up, over all plans of a run, and so what each plan has to train again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dtfm.scheduler.model.counted import NOTHING_COUNTED, Counted
from dtfm.scheduler.model.owed import NOTHING_OWED, Owed, Range, total
from dtfm.scheduler.model.plan import Plan


@dataclass(frozen=True, slots=True)
class Debts:
    """``adopted``: the debts under the plans so far, in order, without repetitions. ``committed``: the debt under the last plan
    with a committed step. ``of_round``: by island, its training in each step since the last exchange, and ``rates``, the learning
    rates of these steps. ``alone``: by island, the single node that it had in all of these steps."""

    adopted: tuple[Owed, ...] = (NOTHING_OWED,)
    committed: Owed = NOTHING_OWED
    of_round: Mapping[int, tuple[tuple[Range, ...], ...]] = field(default_factory=dict)
    rates: tuple[float, ...] = ()
    alone: Mapping[int, str] = field(default_factory=dict)

    def under(self, plan: Plan, batches: int) -> Owed:
        """The debt under a plan with this plan's islands that is adopted after ``batches`` batches."""
        gone = [steps for island, steps in self.of_round.items() if island not in plan.places]
        lost = [each for steps in gone for had in steps for each in had]
        if not lost:
            return self.committed
        before, of_batch = self.committed, plan.of_batch
        new = before.new + max(0, (batches - before.since) * of_batch - total(before.again))
        return Owed(batches, joined([*lost, *before.left(batches, of_batch)]), new)

    def counted(self, plan: Plan, batches: int) -> Counted:
        """What the islands of this plan, which is adopted after ``batches`` batches, have trained since the last exchange."""
        had = {island: sum(map(total, self.of_round[island])) for island in plan.places if island in self.of_round}
        return Counted(batches, tuple(sorted(had.items()))) if had else NOTHING_COUNTED

    def all_trained_all(self, plan: Plan) -> bool:
        """Whether each island of the plan has trained in each step since the last exchange."""
        return all(len(self.of_round.get(island, ())) == len(self.rates) for island in plan.places)

    def with_plan(self, plan: Plan) -> Debts:
        """The debts after this plan was adopted."""
        return self if plan.owed == self.adopted[-1] else replace(self, adopted=(*self.adopted, plan.owed))

    def with_step(self, plan: Plan, batches: int, rate: float, *, at_rest: bool) -> Debts:
        """The debts after a step was committed under this plan, with this learning rate. ``batches``: the batches before it."""
        of_round = {
            island: (*self.of_round.get(island, ()), tuple(plan.owed.taken(batches, places, plan.of_batch)))
            for island, places in ({} if at_rest else plan.places).items()
        }
        now = {island.stages[0].island: island.nodes[0] for island in plan.islands if len(island.nodes) == 1}
        alone = {number: node for number, node in now.items() if not self.rates or self.alone.get(number) == node}
        return Debts(
            self.adopted, plan.owed, of_round, () if at_rest else (*self.rates, rate), {} if at_rest else alone
        )

    def back_to(self, batches: int) -> Debts:
        """The debts after the run went back to the point of ``batches`` batches."""
        known = tuple(owed for owed in self.adopted if owed.since <= batches)
        return Debts(known, known[-1])


def joined(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """The ranges in order. Adjacent ranges become one."""
    found = list[Range]()
    for first, past_last in sorted(ranges):
        if found and found[-1][1] == first:
            found[-1] = found[-1][0], past_last
        else:
            found.append((first, past_last))
    return tuple(found)
