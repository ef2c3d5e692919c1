"""What islands had trained when they were given up, over all plans of a run: hence what each plan has to train again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dtfm.scheduler.model.owed import NOTHING_OWED, Owed, Range, total
from dtfm.scheduler.model.plan import Plan


@dataclass(frozen=True, slots=True)
class Debts:
    """``adopted``: what was owed under the plans so far, in order; where it was the same under several, once. ``of_round``: those
    under which steps were trained since the last exchange, each with the number of its first, of those that train."""

    adopted: tuple[Owed, ...] = (NOTHING_OWED,)
    of_round: tuple[tuple[int, Plan], ...] = ()

    def under(self, plan: Plan, trained: int) -> Owed:
        """What is owed under a plan with the islands of this one that is adopted after ``trained`` steps."""
        before, last = self.adopted[-1], plan
        if self.of_round:
            _, last = self.of_round[-1]
            before = last.owed
        of_step, ends = sum(map(len, plan.places.values())), [*(first for first, _ in self.of_round[1:]), trained + 1]
        lost = [
            taken
            for (first, former), end in zip(self.of_round, ends, strict=False)
            for island in last.places.keys() - plan.places.keys()
            for number in range(first, end)
            for taken in former.owed.taken(number, former.places[island], of_step)
        ]
        left = before.left(trained, of_step)
        if not lost and (left or not before.again):
            return before
        return Owed(trained, _joined([*lost, *left]), before.behind + total(lost))

    def with_plan(self, plan: Plan) -> Debts:
        """After this plan was adopted."""
        return self if plan.owed == self.adopted[-1] else replace(self, adopted=(*self.adopted, plan.owed))

    def with_step(self, plan: Plan, trained: int, *, at_rest: bool) -> Debts:
        """After a step was committed under this plan, with ``trained`` steps until then."""
        if at_rest:
            return replace(self, of_round=())
        if self.of_round and self.of_round[-1][1] is plan:
            return self
        return replace(self, of_round=(*self.of_round, (trained, plan)))

    def back_to(self, trained: int) -> Debts:
        """After the run went back to where ``trained`` steps were."""
        return Debts(tuple(owed for owed in self.adopted if owed.since <= trained))


def _joined(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """In order, and as one where one begins where another ends."""
    found = list[Range]()
    for first, past_last in sorted(ranges):
        if found and found[-1][1] == first:
            found[-1] = found[-1][0], past_last
        else:
            found.append((first, past_last))
    return tuple(found)
