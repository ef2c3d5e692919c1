"""A plan from one node's point of view: its stage, its neighbours, its replica groups. Plans from the wire are checked."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from dtfm.kernels.layout import Codec
from dtfm.node.model.bucket import BucketSpec
from dtfm.scheduler.formats.plan import unpack_plan
from dtfm.scheduler.model.chains import chains, held_out_chains, looked_at
from dtfm.scheduler.model.counted import NOTHING_COUNTED, Counted
from dtfm.scheduler.model.memory import Keeping
from dtfm.scheduler.model.owed import NOTHING_OWED, Owed
from dtfm.scheduler.model.plan import Plan, check
from dtfm.scheduler.model.rounds import NO_ROUNDS, Rounds

Chains = tuple[tuple[str, ...], ...]
"""By micro-batch, the nodes that compute it, one per stage."""

PIECE_ELEMENTS = 1 << 21
"""Most elements in a piece. Reducing takes memory for a few pieces beside the gradients. Under most codecs a piece is several
frames, so that their arrival tells a link's speed."""


MOST_TAKEOVERS = 1000
"""The most nodes that can be members of a run."""


def read_plan(packed: bytes, layers: int, micro_batches: int, step: int) -> Plan:
    """The plan in ``packed`` (see `pack_plan`), which begins after ``step``. ``layers`` and ``micro_batches``: the model's
    layers, and the micro-batches of a batch of the run file.

    Raises ValueError, which names the error, unless the plan's parts fit together (plan.check).
    """
    plan = unpack_plan(packed)
    if len(plan.takeovers) > MOST_TAKEOVERS:
        raise ValueError(f"the plan has {len(plan.takeovers)} takeovers; it may have {MOST_TAKEOVERS}")
    check(plan, layers, micro_batches)
    if plan.rounds.since > step or max(plan.owed.since, plan.counted.since) > plan.rounds.batches(step):
        raise ValueError(
            f"the plan's rounds, or its owed or counted micro-batches, begin after step {step}, but the plan follows that step"
        )
    if len(plan.islands) > 1 and not plan.rounds.count:
        raise ValueError(
            f"there are {len(plan.islands)} islands, and no rounds after which they exchange what they learn"
        )
    return plan


def shards(elements: int, members: int) -> list[tuple[int, int]]:
    """Half-open ranges that divide a bucket among the members of its group, equal except for rounding.

    Shard i belongs to member i, which sums that range for all (arXiv 2206.01288, section 3.2: each device acts as the parameter
    server of one shard). Borders fall on multiples of 256, a codec's block.
    """
    borders = [min(elements, -(-elements * i // (members * 256)) * 256) for i in range(members)] + [elements]
    return [(borders[i], borders[i + 1]) for i in range(members)]


@functools.lru_cache(maxsize=4096)
def pieces(elements: int, members: int) -> tuple[tuple[int, int], ...]:
    """The shards cut into half-open ranges of at most PIECE_ELEMENTS.

    First comes the first piece of each shard, then the second of each, and so on: member i % members sums piece i. A shard with
    fewer pieces than the longest one is filled up with empty ranges.
    """
    divided = shards(elements, members)
    rounds = max(1, max(-(-(stop - start) // PIECE_ELEMENTS) for start, stop in divided))
    return tuple(
        (min(start + number * PIECE_ELEMENTS, stop), min(start + (number + 1) * PIECE_ELEMENTS, stop))
        for number in range(rounds)
        for start, stop in divided
    )


@dataclass(frozen=True, slots=True)
class MatrixPiece:
    """A half-open range of a bucket's `updates`, within the matrix with this number. ``owner`` is the rank of the member that
    finds the matrix's update."""

    matrix: int
    owner: int
    start: int
    stop: int


@functools.lru_cache(maxsize=4096)
def matrix_pieces(sizes: tuple[int, ...], members: int) -> tuple[MatrixPiece, ...]:
    """The updates of a bucket's matrices, which have ``sizes`` elements, cut into pieces of at most PIECE_ELEMENTS. The largest
    matrix goes first to a member, and each next one to the member that has the least."""
    load, owners = [0] * members, dict[int, int]()
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        owners[number] = min(range(members), key=load.__getitem__)
        load[owners[number]] += sizes[number]
    begins = [0, *itertools.accumulate(sizes)]
    return tuple(
        MatrixPiece(number, owners[number], start, min(start + PIECE_ELEMENTS, begins[number + 1]))
        for number in range(len(sizes))
        for start in range(begins[number], begins[number + 1], PIECE_ELEMENTS)
    )


@dataclass(frozen=True, slots=True)
class Group:
    """The nodes that hold one bucket, in pipeline order: they reduce its gradients together.

    A layer's bucket is held by the replicas of its stage, a tied parameter's by the replicas of every stage that uses it.
    """

    members: tuple[str, ...]
    counted_by: tuple[str, ...]
    """The replicas of the first of these stages. Only they count the bucket in the gradient norm."""
    stages: tuple[int, ...]
    """By member, its stage."""
    loads: tuple[float, ...]
    """By member, the number of a step's micro-batches that it computes."""
    islands: tuple[int, ...]
    """By member, its island."""

    def piece(self, elements: int, number: int) -> tuple[int, int]:
        """The half-open range of a piece of a bucket with this number of ``elements``; empty if there is no such piece."""
        ranges = pieces(elements, len(self.members))
        return ranges[number] if number < len(ranges) else (0, 0)

    def owner(self, number: int) -> str:
        """The member that adds up the piece."""
        return self.members[number % len(self.members)]

    def senders(self, number: int) -> tuple[int, ...]:
        """The ranks of the members that send a piece's changes to all under a sparse codec: one of each island, by turns. The
        members of an island have the same changes."""
        order = sorted(range(len(self.islands)), key=self.islands.__getitem__)
        ranks = [[*each] for _, each in itertools.groupby(order, self.islands.__getitem__)]
        return tuple(sorted(each[number % len(each)] for each in ranks))


@dataclass(frozen=True, slots=True)
class Placement:
    """One node's place in a plan. Micro-batches are numbered within a step."""

    node: str
    generation: int
    stage: int
    """The stage's number within the island."""
    stages: int
    """The number of the island's stages."""
    layers: tuple[int, int]
    replicas: tuple[str, ...]
    micro_batches: tuple[int, ...]
    previous: Mapping[int, str]
    """By micro-batch of this node, the node that sends its activation. Empty on the first stage."""
    next: Mapping[int, str]
    """By micro-batch of this node, the node that receives its output. Empty on the last stage."""
    evaluation_micro_batches: tuple[int, ...]
    evaluation_previous: Mapping[int, str]
    """`previous` for held-out micro-batches."""
    evaluation_next: Mapping[int, str]
    """`next` for held-out micro-batches."""
    in_flight: int
    """The most micro-batches that may be forward but not yet backward here."""
    groups: Mapping[int, Group]
    """By bucket of the stage, its group within this node's island."""
    keeping: Keeping
    """How this node keeps what it needs."""
    exchange_groups: Mapping[int, Group] = field(default_factory=dict)
    """By bucket of the stage, its group over all islands. Empty without rounds."""
    rounds: Rounds = NO_ROUNDS
    owed: Owed = NOTHING_OWED
    shares: Mapping[int, int] = field(default_factory=dict)
    """By island, the number of a step's micro-batches that it computes."""
    counted: Counted = NOTHING_COUNTED
    """What islands had trained since the last exchange when the plan was adopted."""
    places: range = range(0)
    """The micro-batches of a step that the island computes."""
    looked: tuple[int, ...] = ()
    """Of this node's micro-batches, those along whose chains held-out samples go when outer steps are tried."""
    all_micro_batches: int = 0
    """The micro-batches of a step."""
    island: int = 0
    """The island's number."""
    trained_before: int = 0
    """The number of training steps before the island began with moments of zero."""
    is_new: bool = False
    """The island begins now, with moments of zero."""
    is_main: bool = True
    """The island is the plan's first, which writes snapshots."""
    near: frozenset[str] = frozenset()
    """The replicas of the node's stage and of its neighbouring stages."""
    frees_first: bool = False
    """The node has no memory for the stage beside its old one."""

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1

    @property
    def peers(self) -> set[str]:
        """The nodes that this node sends tensors to or receives them from."""
        ways = (self.previous, self.next, self.evaluation_previous, self.evaluation_next)
        neighbours = {node for way in ways for node in way.values()}
        groups = (*self.groups.values(), *self.exchange_groups.values())
        return (neighbours | {m for group in groups for m in group.members}) - {self.node}

    def share_in_exchange(self, bucket: int, codec: Codec, step: int, island: int | None = None) -> float:
        """The factor of a change of a bucket in the sum of the exchange ``step``: of this node's change, or that of a holder in
        another ``island``.

        The factors of an island's holders add up to the island's part of the samples since the last exchange. Under a sparse
        codec one of the holders brings in the whole part.
        """
        number = self.island if island is None else island
        of_island = self.counted.weights(self.rounds, self.shares, step)[number]
        return of_island if codec.sparse else of_island / self.exchange_groups[bucket].islands.count(number)


def placement_of(
    plan: Plan,
    node: str,
    evaluation_micro_batches: int,
    buckets: Iterable[BucketSpec] = (),
    *,
    twice: bool = False,
    trained_before: int = 0,
    is_new: bool = False,
) -> Placement | None:
    """``node``'s placement, or None when the plan leaves it idle. ``buckets`` are the model's. ``twice``: see held_out_chains.
    ``trained_before`` and ``is_new``: see Placement."""
    number = plan.island_of(node)
    if number is None:
        return None
    island = next(each for each in plan.islands if each.stages[0].island == number)
    index = island.stage_of(node)
    assert index is not None
    stage = island.stages[index]
    training, held_out = chains(plan), held_out_chains(plan, evaluation_micro_batches, twice=twice)
    mine, mine_held_out = _micro_batches(training, node), _micro_batches(held_out, node)
    held = [spec for spec in buckets if spec.used_by(*stage.layers)]
    return Placement(
        node=node,
        generation=plan.generation,
        stage=index,
        stages=len(island.stages),
        layers=stage.layers,
        replicas=stage.replicas,
        micro_batches=mine,
        previous=_neighbours(training, mine, index - 1),
        next=_neighbours(training, mine, index + 1),
        evaluation_micro_batches=mine_held_out,
        evaluation_previous=_neighbours(held_out, mine_held_out, index - 1),
        evaluation_next=_neighbours(held_out, mine_held_out, index + 1),
        # Unless the plan says: one per stage from here on, and as many again to keep links and devices busy.
        in_flight=stage.in_flight[stage.replicas.index(node)] if stage.in_flight else 2 * (len(island.stages) - index),
        keeping=stage.keeping[stage.replicas.index(node)] if stage.keeping else Keeping(),
        groups={spec.index: group_of(island, spec.layers) for spec in held},
        exchange_groups={spec.index: exchange_group_of(plan, spec.layers) for spec in held}
        if plan.rounds.count
        else {},
        rounds=plan.rounds,
        owed=plan.owed,
        shares={each: len(places) for each, places in plan.places.items()},
        counted=plan.counted,
        places=plan.places[number],
        looked=tuple(each for each in looked_at(plan)[number] if each in mine),
        all_micro_batches=len(training),
        island=number,
        trained_before=trained_before,
        is_new=is_new,
        frees_first=node in plan.frees_first,
        is_main=number == plan.stages[0].island,
        near=frozenset(node for each in island.stages[max(0, index - 1) : index + 2] for node in each.replicas),
    )


def group_of(plan: Plan, layers: Collection[int]) -> Group:
    """The group of a bucket that ``layers`` use."""
    stages = [(i, s) for i, s in enumerate(plan.stages) if any(s.layers[0] <= layer < s.layers[1] for layer in layers)]
    assert stages, f"no stage of the plan has layers {sorted(layers)}"
    return Group(
        members=tuple(node for _, stage in stages for node in stage.replicas),
        counted_by=stages[0][1].replicas,
        stages=tuple(index for index, stage in stages for _ in stage.replicas),
        loads=tuple(load for _, stage in stages for load in stage.loads),
        islands=tuple(stage.island for _, stage in stages for _ in stage.replicas),
    )


def exchange_group_of(plan: Plan, layers: Collection[int]) -> Group:
    """The group of the bucket over all islands. The members of an island bring in the same change, each with its part of the
    island's micro-batches."""
    group = group_of(plan, layers)
    loads = tuple(len(plan.places[island]) / group.islands.count(island) for island in group.islands)
    return replace(group, stages=(0,) * len(loads), loads=loads)


def _micro_batches(ways: Chains, node: str) -> tuple[int, ...]:
    return tuple(number for number, chain in enumerate(ways) if node in chain)


def _neighbours(ways: Chains, micro_batches: tuple[int, ...], stage: int) -> dict[int, str]:
    """By micro-batch of one island, its node in ``stage``; empty if there is no such stage."""
    return {number: ways[number][stage] for number in micro_batches if 0 <= stage < len(ways[number])}
