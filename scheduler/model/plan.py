"""The plan: which node computes what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from dtfm.scheduler.model.counted import NOTHING_COUNTED, Counted
from dtfm.scheduler.model.memory import Keeping
from dtfm.scheduler.model.owed import NOTHING_OWED, Owed
from dtfm.scheduler.model.rounds import NO_ROUNDS, Rounds
from dtfm.scheduler.model.workload import Workload


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers [first, past_last) and the replicas: nodes that each hold all of these layers."""

    layers: tuple[int, int]
    replicas: tuple[str, ...]
    loads: tuple[int, ...]
    """By replica, the micro-batches of a step that it computes."""
    in_flight: tuple[int, ...] = ()
    """By replica, the most micro-batches that it holds between forward and backward. Empty: memory.in_flight."""
    keeping: tuple[Keeping, ...] = ()
    """By replica, how it keeps what it needs. Empty: as Keeping() says."""
    island: int = 0
    """The number of the stage's island."""


@dataclass(frozen=True, slots=True)
class Flow:
    """The number of a step's micro-batches that go from one seat to a seat of the next stage."""

    sender: str
    receiver: str
    micro_batches: int


@dataclass(frozen=True, slots=True)
class Takeover:
    """``node`` was lost. ``heirs`` are replicas of its stage with the number of its micro-batches that each takes over. Without
    heirs the node had no micro-batches.

    ``place`` is the index that the node had among the stage's replicas.
    """

    stage: int
    node: str
    place: int
    heirs: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Plan:
    """Stages in pipeline order, island by island. A node is in exactly one stage, or idle.

    Flows decide which micro-batch goes where (chains.py). A new plan has no takeovers. When a node is lost, others take its
    micro-batches over, and no other node's micro-batches may change. So the flows go on naming the lost node's seat.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}  # for PLAN.json: a misspelt key is an error

    generation: int
    stages: tuple[Stage, ...]
    flows: tuple[tuple[Flow, ...], ...]
    """An entry for each boundary between two stages, in order of the sender's place, then of the receiver's. Empty between two
    islands."""
    idle: tuple[str, ...] = ()
    takeovers: tuple[Takeover, ...] = ()
    """Who computes instead of lost nodes, in the order of their loss."""
    rounds: Rounds = NO_ROUNDS
    """When the plan's islands exchange what they have learnt."""
    owed: Owed = NOTHING_OWED
    """Which micro-batches come again."""
    counted: Counted = NOTHING_COUNTED
    """What islands had trained since the last exchange when the plan was adopted."""
    frees_first: tuple[str, ...] = ()
    """The nodes that have no memory for their new stage beside their old one. They move state that they do not need any longer
    out of the way before they load anything (cost/room.py)."""

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """All nodes that compute, stage by stage."""
        return tuple(node for stage in self.stages for node in stage.replicas)

    def stage_of(self, node: str) -> int | None:
        """Index of the stage that the node holds, or None."""
        return self._stages.get(node)

    @cached_property
    def _stages(self) -> dict[str, int]:
        return {node: index for index, stage in enumerate(self.stages) for node in stage.replicas}

    @property
    def islands(self) -> tuple[Plan, ...]:
        """The islands in order, each as a plan of its own with its share of a step's micro-batches. Nobody is idle there."""
        numbers = tuple(dict.fromkeys(stage.island for stage in self.stages))
        return (self,) if len(numbers) == 1 else tuple(self._island(number) for number in numbers)

    @cached_property
    def places(self) -> Mapping[int, range]:
        """By an island's number, the micro-batches of a step that it computes."""
        found, end = dict[int, range](), 0
        for island in self.islands:
            start, end = end, end + sum(island.stages[0].loads)
            found[island.stages[0].island] = range(start, end)
        return found

    @property
    def micro_batches(self) -> int:
        """The micro-batches of a step."""
        return sum(map(len, self.places.values()))

    @property
    def of_batch(self) -> int:
        """The micro-batches of a batch of the run file. The rounds say how many batches a step has."""
        return self.micro_batches // self.rounds.batches_each

    def weights(self, step: int) -> dict[int, float]:
        """By island, its part of the sum in the exchange ``step``."""
        return self.counted.weights(self.rounds, {island: len(each) for island, each in self.places.items()}, step)

    def place_in_island(self, stage: int) -> int:
        """Index, among the stages of its island, of the stage with this index."""
        return stage - [each.island for each in self.stages].index(self.stages[stage].island)

    def name_of(self, stage: int) -> str:
        """The name of the stage with this index: "stage 1", or with several islands "island 2, stage 0"."""
        several = len({each.island for each in self.stages}) > 1
        return f"island {self.stages[stage].island}, " * several + f"stage {self.place_in_island(stage)}"

    def island_of(self, node: str) -> int | None:
        """The number of the node's island, or None."""
        stage = self.stage_of(node)
        return None if stage is None else self.stages[stage].island

    def beside(self, stage: int) -> tuple[int | None, int | None]:
        """The stages before and after this one, in its island."""
        island = self.stages[stage].island
        before, after = stage - 1, stage + 1
        return (
            before if before >= 0 and self.stages[before].island == island else None,
            after if after < len(self.stages) and self.stages[after].island == island else None,
        )

    @property
    def last_stages(self) -> tuple[Stage, ...]:
        """The stages that compute the loss: the last of each island."""
        return tuple(stage for index, stage in enumerate(self.stages) if self.beside(index)[1] is None)

    def _island(self, number: int) -> Plan:
        first = next(index for index, stage in enumerate(self.stages) if stage.island == number)
        stages = tuple(stage for stage in self.stages if stage.island == number)
        past_last = first + len(stages)
        takeovers = tuple(
            replace(takeover, stage=takeover.stage - first)
            for takeover in self.takeovers
            if first <= takeover.stage < past_last
        )
        return Plan(self.generation, stages, self.flows[first : past_last - 1], takeovers=takeovers)

    def seats(self, stage: int) -> dict[str, int]:
        """The stage's nodes in order as before any takeover, and the micro-batches that each had.

        These are the living replicas, and the lost nodes at the places that they had. Raises ValueError if the takeovers do not
        fit the stage.
        """
        order = list(self.stages[stage].replicas)
        had = dict(zip(order, self.stages[stage].loads, strict=True))
        for takeover in reversed(self.takeovers):
            if takeover.stage == stage:
                _undo(takeover, order, had)
        return {node: had[node] for node in order}


def _undo(takeover: Takeover, order: list[str], had: dict[str, int]) -> None:
    what = f"the takeover of {takeover.node!r} in stage {takeover.stage}"
    if takeover.node in had or not 0 <= takeover.place <= len(order):
        raise ValueError(f"{what} has place {takeover.place}, or its name is taken")
    if len(dict(takeover.heirs)) < len(takeover.heirs):
        raise ValueError(f"{what} names an heir twice")
    for heir, count in takeover.heirs:
        if heir not in had or not 1 <= count <= had[heir]:
            raise ValueError(f"{what} gives {count} micro-batches to {heir!r}, which then had {had.get(heir, 0)}")
        had[heir] -= count
    order.insert(takeover.place, takeover.node)
    had[takeover.node] = sum(count for _, count in takeover.heirs)


def from_routes(
    generation: int, stages: Sequence[Stage], routes: Sequence[tuple[Sequence[str], int]], idle: tuple[str, ...] = ()
) -> Plan:
    """A plan with the loads and flows of ``routes``: one node per stage, and a number of micro-batches. The stages' own loads
    are ignored."""
    loads: list[Counter[str]] = [Counter() for _ in stages]
    flows: list[Counter[tuple[str, str]]] = [Counter() for _ in stages[1:]]
    for nodes, count in routes:
        for node, load in zip(nodes, loads, strict=True):
            load[node] += count
        for boundary, sender, receiver in zip(flows, nodes, nodes[1:], strict=False):
            boundary[sender, receiver] += count
    return Plan(
        generation,
        tuple(
            replace(stage, loads=tuple(load[node] for node in stage.replicas))
            for stage, load in zip(stages, loads, strict=True)
        ),
        tuple(
            tuple(Flow(a, b, counted[a, b]) for a in before.replicas for b in after.replicas if (a, b) in counted)
            for counted, before, after in zip(flows, stages, stages[1:], strict=False)
        ),
        idle,
    )


def joined(islands: Sequence[Plan], generation: int, idle: tuple[str, ...] = ()) -> Plan:
    """The plan with these islands. The inverse of `Plan.islands`."""
    stages, flows, takeovers = list[Stage](), list[tuple[Flow, ...]](), list[Takeover]()
    for island in islands:
        takeovers += (replace(takeover, stage=takeover.stage + len(stages)) for takeover in island.takeovers)
        flows += [()] if stages else []
        stages += island.stages
        flows += island.flows
    return Plan(generation, tuple(stages), tuple(flows), idle, tuple(takeovers))


def numbered(island: Plan, number: int) -> Plan:
    """The island, with this number."""
    return replace(island, stages=tuple(replace(stage, island=number) for stage in island.stages))


def validate(plan: Plan, cluster_ids: Collection[str], workload: Workload) -> None:
    """Raises ValueError unless the plan is valid for these nodes and this workload.

    A plan is valid when `check` passes, each node of the cluster is in exactly one stage or idle, and no other node is named.
    Whether the links exist and the memory suffices is not checked here.
    """
    check(plan, len(workload.layers), workload.micro_batches)
    places = {*plan.nodes, *plan.idle}
    if strange := sorted(places - set(cluster_ids)):
        raise ValueError(f"node {strange[0]!r} is not in the cluster")
    if missing := sorted(set(cluster_ids) - places):
        raise ValueError(f"node {missing[0]!r} is neither in a stage nor idle")


def unless_usual(keeping: tuple[Keeping, ...]) -> tuple[Keeping, ...]:
    """``Stage.keeping`` for these replicas: empty when all of them keep as Keeping() says."""
    return keeping if any(each != Keeping() for each in keeping) else ()


def check(plan: Plan, layers: int, micro_batches: int) -> None:
    """Raises ValueError unless the plan's parts fit together. ``micro_batches``: of a batch of the run file.

    - The stages of each island cover every layer once and in order. No node has two places.
    - The loads of every stage, its takeovers, and the flows into and out of it add up to the island's micro-batches.
    - The micro-batches of all islands add up to a step's.
    """
    for node, count in Counter([*plan.nodes, *plan.idle]).items():
        if count > 1:
            raise ValueError(f"node {node!r} appears {count} times; it may appear once")
    if not plan.stages:
        raise ValueError("the plan has no stages")
    if strangers := sorted({*plan.frees_first} - {*plan.nodes}):
        raise ValueError(f"node {strangers[0]!r} is to free memory first, and is in no stage")
    if plan.owed.new > plan.owed.since * micro_batches:
        raise ValueError(
            f"the next new micro-batch is {plan.owed.new}; it may be {plan.owed.since * micro_batches} at most"
        )
    if gone := sorted({island for island, _ in plan.counted.had} - {*plan.places}):
        raise ValueError(f"island {gone[0]} is to count in the exchange, and is not in the plan")
    micro_batches *= plan.rounds.batches_each
    if len(islands := plan.islands) == 1:
        _check_island(plan, layers, micro_batches)
        return
    apart = joined(islands, plan.generation)
    if (apart.stages, apart.flows, len(apart.takeovers)) != (plan.stages, plan.flows, len(plan.takeovers)):
        raise ValueError("the stages of an island are not side by side, or micro-batches go from one island to another")
    for island in islands:
        _check_island(island, layers, island.micro_batches)
    if (total := plan.micro_batches) != micro_batches:
        raise ValueError(f"the islands' loads add up to {total}; a step has {micro_batches} micro-batches")


def _check_island(plan: Plan, layers: int, micro_batches: int) -> None:
    _check_stages(plan, layers)
    for index, stage in enumerate(plan.stages):
        if len(stage.loads) != len(stage.replicas):
            raise ValueError(f"stage {index} has {len(stage.loads)} loads; it has {len(stage.replicas)} replicas")
        if stage.in_flight and len(stage.in_flight) != len(stage.replicas):
            raise ValueError(
                f"stage {index} has {len(stage.in_flight)} numbers in flight; it has {len(stage.replicas)} replicas"
            )
        if stage.in_flight and min(stage.in_flight) < 1:
            raise ValueError(f"stage {index} has {min(stage.in_flight)} in flight; it must be 1 or above")
        if stage.keeping and len(stage.keeping) != len(stage.replicas):
            raise ValueError(
                f"stage {index} says of {len(stage.keeping)} replicas how they keep what they need; it has {len(stage.replicas)}"
            )
        if min(stage.loads) < 0:
            raise ValueError(f"stage {index} has a load of {min(stage.loads)}; it must be 0 or above")
        if (total := sum(stage.loads)) != micro_batches:
            raise ValueError(f"stage {index}'s loads add up to {total}; a step has {micro_batches} micro-batches")
    for takeover in plan.takeovers:
        if not 0 <= takeover.stage < len(plan.stages):
            raise ValueError(
                f"the takeover of {takeover.node!r} names stage {takeover.stage}; there are {len(plan.stages)}"
            )
    if len(plan.flows) != len(plan.stages) - 1:
        raise ValueError(f"there are flows for {len(plan.flows)} boundaries; {len(plan.stages)} stages have one fewer")
    seats = [plan.seats(stage) for stage in range(len(plan.stages))]
    for boundary, flows in enumerate(plan.flows):
        _check_flows(boundary, flows, seats[boundary], seats[boundary + 1])


def _check_stages(plan: Plan, layers: int) -> None:
    expected = 0
    for index, stage in enumerate(plan.stages):
        first, past_last = stage.layers
        if first != expected or past_last <= first:
            raise ValueError(
                f"stage {index} has layers [{first}, {past_last}); it must start at {expected} and not be empty"
            )
        if not stage.replicas:
            raise ValueError(f"stage {index} has no replicas")
        expected = past_last
    if expected != layers:
        raise ValueError(f"the stages end at layer {expected}; the workload has {layers}")


def _check_flows(boundary: int, flows: tuple[Flow, ...], senders: dict[str, int], receivers: dict[str, int]) -> None:
    place_out, place_in = ({node: place for place, node in enumerate(seats)} for seats in (senders, receivers))
    sent: Counter[str] = Counter()
    received: Counter[str] = Counter()
    last = (-1, -1)
    for flow in flows:
        what = f"the flow from {flow.sender!r} to {flow.receiver!r} after stage {boundary}"
        if flow.sender not in senders or flow.receiver not in receivers:
            raise ValueError(f"{what} is not between replicas of stages {boundary} and {boundary + 1}")
        if flow.micro_batches < 1:
            raise ValueError(f"{what} has {flow.micro_batches} micro-batches; it must have at least 1")
        here = place_out[flow.sender], place_in[flow.receiver]
        if here <= last:
            raise ValueError(f"{what} comes twice or late: flows are in order of the sender, then of the receiver")
        last = here
        sent[flow.sender] += flow.micro_batches
        received[flow.receiver] += flow.micro_batches
    for counted, seats, way in ((sent, senders, "from"), (received, receivers, "to")):
        for node, load in seats.items():
            if counted[node] != load:
                raise ValueError(
                    f"the flows {way} {node!r} after stage {boundary} add up to {counted[node]}; its load is {load}"
                )
