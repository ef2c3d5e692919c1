"""Checks of a plan's nodes' reports about their state and about a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from dtfm.coordinator.config.codecs import TENSORS, allowed_codecs
from dtfm.coordinator.core.phases import StateTold
from dtfm.coordinator.core.refusal import check_number, require
from dtfm.coordinator.core.validation.admission import MAX_NODES
from dtfm.coordinator.log.events import Codecs
from dtfm.protos import control_pb2 as wire
from dtfm.protos.run_file.network_table import Network
from dtfm.scheduler.model.chains import micro_batches_of
from dtfm.scheduler.model.plan import Plan

DIGEST_BYTES = 32
"""The length of a BLAKE3 digest."""
MOST_MICRO_BATCHES = 1 << 20
MOST_DONORS = 8
"""The number of donors that a node may name for one bucket."""


def check_vote(vote: wire.StepReady, buckets: int) -> None:
    """Raises Refused for a vote that cannot be counted. ``buckets``: the number of buckets. Numbers that are not finite pass: see
    `is_finite`."""
    check_digest(vote.state_digest)
    check_states(vote.states, buckets)
    norm = vote.squared_gradient_norm
    require(not norm < 0, "squared_gradient_norm", norm, "0 or more")
    require(not vote.squared_change_norm < 0, "squared_change_norm", vote.squared_change_norm, "0 or more")
    check_number("compute_seconds", vote.compute_seconds, 0, 1e7)
    check_number("wait_seconds", vote.wait_seconds, 0, 1e7)
    check_arrived(vote.arrived, least=1)
    require(len(vote.losses) <= MOST_MICRO_BATCHES, "losses", len(vote.losses), f"at most {MOST_MICRO_BATCHES} numbers")


def check_arrived(entries: Sequence[wire.StepReady.Arrived], least: int = 0) -> None:
    """Raises Refused for impossible arrivals. ``least``: the least bytes of each entry."""
    require(len(entries) <= MAX_NODES, "arrived", len(entries), f"at most {MAX_NODES} entries")
    for arrived in entries:
        check_number("arrived.seconds", arrived.seconds, 0, 1e7)
        check_number("arrived.bytes", arrived.bytes, least, 1e15)
    sources = [arrived.source for arrived in entries]
    require(len(set(sources)) == len(sources), "arrived.source", sources[:20], "each once")


def check_loss(vote: wire.StepReady, family: str) -> None:
    """Raises Refused for a loss below 0, which no language model has. A model of the ``family`` "module" may have any loss."""
    require(family == "module" or not vote.loss_sum < 0, "loss_sum", vote.loss_sum, "0 or more")


def check_clipped(vote: wire.StepReady, node: str, plan: Plan, *, is_open: bool) -> None:
    """Raises Refused for gradients that the node cannot have clipped. Nodes clip only if members are strangers, and only the
    addends of others. A node that reports clipping ends the audit of its own sums."""
    number, none = len(vote.clipped), 'empty: only with trust.mode = "open" are gradients clipped'
    require(is_open or not number, "clipped", number, none)
    named = [clipped.node for clipped in vote.clipped]
    others = len(set(named)) == len(named) and all(plan.stage_of(n) is not None and n != node for n in named)
    require(others, "clipped.node", named[:20], "other nodes of the plan, each once")
    for clipped in vote.clipped:
        require(clipped.worst > 1, "clipped.worst", clipped.worst, "above 1")


def check_digest(digest: bytes, field: str = "state_digest") -> None:
    """Raises Refused unless this is a digest of a state. Its length matters: several digests are hashed together, in a row."""
    require(len(digest) == DIGEST_BYTES, field, digest[:80].hex(), f"a digest of {DIGEST_BYTES} bytes")


def check_states(
    states: Collection[wire.BucketState],
    buckets: int,
    givers: Callable[[int], Collection[str]] = lambda _: (),
    due: Collection[int] = (),
) -> dict[int, StateTold]:
    """By bucket, the state that a node reports to hold. Leaves out donors that are not among the bucket's ``givers``. Raises
    Refused for buckets that do not exist or come twice, or if a bucket that is ``due`` is missing."""
    different = len({state.bucket for state in states}) == len(states)
    require(different, "states", len(states), "of different buckets")
    told: dict[int, StateTold] = {}
    for state in states:
        require(state.bucket < buckets, "states.bucket", state.bucket, f"below {buckets}")
        check_digest(state.digest, "states.digest")
        check_digest(state.shared or bytes(DIGEST_BYTES), "states.shared")
        donors = sorted(set(state.donors[:MOST_DONORS]).intersection(givers(state.bucket)))
        told[state.bucket] = StateTold(state.digest.hex(), tuple(donors))
    missing = sorted(set(due) - told.keys())
    require(not missing, "states", f"nothing of buckets {missing[:20]}", "the digest of every bucket of its stage")
    return told


def check_progress(progress: wire.Progress, plan: Plan, node: str) -> None:
    """Raises Refused for micro-batches that are not the node's."""
    mine = micro_batches_of(plan)[node]
    for field in ("activations", "gradients", "finished"):
        told = getattr(progress, field)
        its_own = len(told) <= len(mine) and set(mine).issuperset(told)
        require(its_own, f"progress.{field}", list(told[:20]), f"among the node's own, {list(mine[:20])}")


def check_lost(lost: Sequence[int], layers: int) -> None:
    """Raises Refused for layers that nobody holds, or that are named twice."""
    different = len(set(lost)) == len(lost) and set(range(layers)).issuperset(lost)
    require(different, "lost", list(lost[:20]), f"different layers below {layers}")


def check_codecs(told: Collection[wire.LinkCodec], plan: Plan, node: str, network: Network) -> Codecs:
    """The codecs that the node sends with under the plan. Raises Refused for a destination outside the plan, or named twice, and
    for a codec that the run does not use."""
    few = len(told) <= len(TENSORS) * len(plan.nodes)
    require(few, "codecs", len(told), f"at most {len(TENSORS)} for each node of the plan")
    codecs: dict[str, dict[str, str]] = {}
    for link in told:
        to, what = link.destination, link.tensors
        require(to != node and to in plan.nodes, "codecs.destination", to, "another node of the plan")
        new = what in TENSORS and what not in codecs.setdefault(to, {})
        require(new, "codecs.tensors", what, f"one of {', '.join(TENSORS)}, each once")
        allowed = allowed_codecs(network, what)
        require(link.codec in allowed, "codecs.codec", link.codec, f"one that the run allows: {', '.join(allowed)}")
        codecs[to][what] = link.codec
    return codecs
