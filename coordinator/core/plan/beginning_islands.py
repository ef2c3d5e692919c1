"""Islands that begin within a round: when the plan with them may be adopted, and whose moments they get.

Within a round a plan changes by whole islands alone. Islands that go on keep their nodes and stages. Free nodes may form new
islands. A new island begins with the weights of the last exchange, which its nodes copy while the others train, and with the
moments of an island that goes on. It counts in the exchange by the micro-batches that it has trained.
"""

from __future__ import annotations

from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.log.ledger import Ledger
from dtfm.scheduler.model.plan import Plan


def steps_left(state: State) -> int:
    """The number of steps that an island could train in this round if it began after the step in hand."""
    step = state.ledger.training.step
    return max(0, state.rounds.next_rest(step) - step - 2) if state.rounds.count else 0


def may_begin_now(state: State) -> bool:
    """Whether the chosen plan may be adopted after the last committed step, within a round: it was chosen for that, and a step
    that trains follows."""
    chosen, step = state.planner.chosen, state.ledger.training.step
    return chosen is not None and chosen.within_round and not state.rounds.exchanges(step + 1)


def moments_for(ledger: Ledger, plan: Plan) -> dict[int, int]:
    """By island that begins with ``plan`` within a round, the island whose moments it gets: of the islands that go on, the one
    from which they come fastest. Empty if moments are zero at the beginning of each round anyway."""
    whole = ledger.whole_islands
    new = [island for island in plan.islands if island.stages[0].island not in whole]
    going_on = [number for number in whole if number in plan.places and number in ledger.training.debts.of_round]
    if not (new and going_on and ledger.training.held) or ledger.training.rounds.restarts:
        return {}
    holders = {number: ledger.holders_in(number) for number in going_on}
    links = ledger.reach.links

    def slowest(island: Plan, source: int) -> float:
        """Bytes per second over the slowest of the links that a node of the island would use."""
        ways = {
            (node, holders[source][layer])
            for stage in island.stages
            for node in stage.replicas
            for layer in range(*stage.layers)
        }
        known = [[link.bandwidth for d in donors if (link := links.get(d, {}).get(node))] for node, donors in ways]
        return min(max(each, default=0.0) for each in known)

    return {
        island.stages[0].island: max(going_on, key=lambda source: (slowest(island, source), -source)) for island in new
    }
