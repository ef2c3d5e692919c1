"""Checks of what nodes send: everything is bounded and validated here before it is used."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from ipaddress import ip_address
from typing import Any

from dtfm.coordinator.config.run_file import CHECKPOINTING, OPTIMIZER_STATE, RunFile
from dtfm.coordinator.config.run_file_tables import Network, Trust
from dtfm.coordinator.core.planner_input import as_the_run_allows
from dtfm.coordinator.core.state import Dialled, StateTold
from dtfm.coordinator.core.trust.codecs import TENSORS, allowed_codecs
from dtfm.coordinator.log.events import Codecs, Described, DeviceSeen, Link
from dtfm.protos import PROTOCOL_VERSION, control_pb2 as wire
from dtfm.protos.access import NAME
from dtfm.protos.bucket_layout import LAYOUT_BYTES
from dtfm.protos.candidates import MOST_CANDIDATES, read_candidate, write_candidate
from dtfm.scheduler.model.chains import micro_batches_of
from dtfm.scheduler.model.memory import KEPT_PER_OUTPUT_BYTE
from dtfm.scheduler.model.plan import Plan
from dtfm.scheduler.model.workload import Layer, Workload

MAX_NODES = 1000
MAX_LAYERS = 10_000
MAX_BUCKETS = 20_000
MOST_MICRO_BATCHES = 1 << 20
MOST_SNAPSHOTS = 4
DIGEST_BYTES = 32
"""Of a BLAKE3."""
MOST_DONORS = 8
"""Donors that a node may name for one bucket."""
SENTENCE_CHARACTERS = 500
MOST_FLOPS = 1e21
MOST_BANDWIDTH = 1e13
MOST_SUMMED = 1e300
"""Losses and squared norms up to here can be summed over all nodes."""

MOST_APART = 2
LEAST_COMPARED = 1 << 20
"""Nodes may count what a layer keeps and works with at up to MOST_APART times what others do; bytes below LEAST_COMPARED count
as that."""

_NONCE = re.compile(r"[0-9a-f]{32}")
_WAYS = ("", "loopback", "lan", "public")


class Refused(ValueError):
    """A message is refused: ``reason`` is for programs, the sentence for people."""

    def __init__(self, reason: wire.RefusalReason, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


def malformed(field: str, value: object, wanted: str) -> Refused:
    return Refused(wire.MALFORMED, f"{field} is {shorten(repr(value), 80)}; it must be {wanted}")


def shorten(text: str, characters: int = SENTENCE_CHARACTERS) -> str:
    """``text`` as one printable line of at most ``characters``."""
    line = "".join(c if c.isprintable() else " " for c in text)
    return line if len(line) <= characters else line[: characters - 3] + "..."


def name_some(names: Iterable[str]) -> str:
    """The first eight of the names, in order, and how many more there are."""
    listed = sorted(names)
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")


def check_version(theirs: int) -> None:
    """Raises Refused if the other side speaks another version of the protocol."""
    if theirs != PROTOCOL_VERSION:
        older = "node" if theirs < PROTOCOL_VERSION else "coordinator"
        raise Refused(
            wire.PROTOCOL_VERSION,
            f"the node speaks protocol version {theirs}, this coordinator {PROTOCOL_VERSION}; update dtfm on the {older}",
        )


def check_name(name: str, field: str = "name") -> None:
    """Raises Refused."""
    if not NAME.fullmatch(name):
        raise malformed(field, name, "1 to 64 letters, digits, dots, dashes and underscores")


def check_hello(hello: wire.Hello, run: RunFile, run_id: str) -> DeviceSeen:
    """The node's device. Raises Refused if the node cannot join; whether its identity is taken is not checked here."""
    check_version(hello.protocol_version)
    check_name(hello.node, "node")
    if hello.run and hello.run not in (run.name, run_id):
        raise Refused(
            wire.WRONG_RUN,
            f"the node asks for run {shorten(repr(hello.run), 80)}, this coordinator has {run.name!r}; give the address of "
            f"the other's coordinator, or leave the run out",
        )
    if hello.relay not in wire.Hello.Relay.values():
        raise malformed("relay", hello.relay, "one that this version knows")
    if len(hello.package_version) > 64:
        raise malformed("package_version", hello.package_version, "at most 64 characters")
    device = hello.device
    if device.kind not in ("cpu", "cuda"):
        raise malformed("device.kind", device.kind, '"cpu" or "cuda"')
    if len(device.name) > 256:
        raise malformed("device.name", device.name, "at most 256 characters")
    if not 0 < device.memory_bytes < 1 << 50:
        raise malformed("device.memory_bytes", device.memory_bytes, "above 0 and below 2**50")
    if device.host_memory_bytes >= 1 << 50:
        raise malformed("device.host_memory_bytes", device.host_memory_bytes, "below 2**50")
    check_flops(device.flops)
    name = shorten(device.name)
    return DeviceSeen(device.kind, name, device.memory_bytes, device.flops, device.host_memory_bytes)


def check_candidates(hello: wire.Hello, seen: str) -> tuple[str, ...]:
    """Where peers may reach the node: what it names, and the port on which it listens at the address ``seen``, from which it
    came (empty: not known). Raises Refused."""
    if len(hello.candidates) > MOST_CANDIDATES or hello.port > 65535:
        raise malformed(
            "candidates", len(hello.candidates), f"at most {MOST_CANDIDATES} of them, and a port below 65536"
        )
    try:
        named = [write_candidate(*read_candidate(text)) for text in hello.candidates]
    except ValueError as error:
        raise Refused(wire.MALFORMED, f"candidates: {shorten(str(error))}; give it with --advertise IP:PORT") from None
    if seen and hello.port and len(named) < MOST_CANDIDATES:
        with contextlib.suppress(ValueError):
            named.append(write_candidate(*read_candidate(write_candidate(ip_address(seen), hello.port))))
    return tuple(dict.fromkeys(named))


def check_reached(report: wire.Reached, reporter: str, known: Collection[str]) -> dict[str, Dialled]:
    """By node, what came of the reporter's attempt to dial it. Nodes that have left meanwhile are dropped. Raises Refused."""
    if len(report.outcomes) > MAX_NODES:
        raise malformed("outcomes", len(report.outcomes), f"at most {MAX_NODES} of them")
    return {
        outcome.node: Dialled(_direct(outcome.way), shorten(outcome.problem))
        for outcome in report.outcomes
        if outcome.node in known and outcome.node != reporter
    }


def check_prepared(prepared: wire.Prepared, run: RunFile) -> Described:
    """The model and the data, as the node prepared them. Raises Refused if a number is impossible or does not fit the run."""
    layers = prepared.workload.layers
    if not 1 <= len(layers) <= MAX_LAYERS:
        raise malformed("workload.layers", len(layers), f"1 to {MAX_LAYERS} of them")
    micro_batches = run.train.global_batch // run.train.micro_batch
    if prepared.workload.micro_batches != micro_batches:
        raise malformed("workload.micro_batches", prepared.workload.micro_batches, f"{micro_batches}, as in the run")
    for index, layer in enumerate(layers):
        if len(layer.name) > 256:
            raise malformed(f"workload.layers[{index}].name", layer.name, "at most 256 characters")
        _number(f"workload.layers[{index}].forward_flops", layer.forward_flops, 0, 1e24)
        _number(f"workload.layers[{index}].parameter_bytes", layer.parameter_bytes, 0, 1 << 50)
        for size in ("activation_bytes", "kept_bytes", "working_bytes"):
            _number(f"workload.layers[{index}].{size}", getattr(layer, size), 0, 1 << 50)
    for part in ("optimizer", "own", "copy"):
        ratio = f"{part}_bytes_per_parameter_byte"
        _number(f"workload.{ratio}", getattr(prepared.workload, ratio), 0, 1000)
    wanted = run.train.activation_checkpointing, run.train.optimizer_state
    told = prepared.workload.activation_checkpointing, prepared.workload.optimizer_state
    if told != (CHECKPOINTING[wanted[0]], OPTIMIZER_STATE[wanted[1]]):
        raise malformed("workload's checkpointing and optimizer state", told, f"{' and '.join(wanted)}, as in the run")
    if not 8 <= len(prepared.data_fingerprint) <= 64:
        raise malformed("data_fingerprint", prepared.data_fingerprint.hex(), "a digest of 8 to 64 bytes")
    if prepared.weights_fingerprint and not 8 <= len(prepared.weights_fingerprint) <= 64:
        raise malformed(
            "weights_fingerprint", prepared.weights_fingerprint.hex(), "empty, or a digest of 8 to 64 bytes"
        )
    if prepared.training_samples < 1:
        raise malformed("training_samples", prepared.training_samples, "1 or more; give more data or shorter samples")
    _number("unigram_entropy", prepared.unigram_entropy, 0, 1000)
    if not 1 <= prepared.tokens_per_sample <= 1 << 24:
        raise malformed("tokens_per_sample", prepared.tokens_per_sample, "1 to 2**24")
    if prepared.flops:
        check_flops(prepared.flops, "flops")
    if len(prepared.on_disk) > MOST_SNAPSHOTS:
        raise malformed("on_disk", len(prepared.on_disk), f"of at most {MOST_SNAPSHOTS} steps")
    if not len(layers) <= prepared.buckets <= MAX_BUCKETS:
        raise malformed("buckets", prepared.buckets, f"{len(layers)} (one per layer) to {MAX_BUCKETS}")
    if len(prepared.layouts) != LAYOUT_BYTES * prepared.buckets:
        raise malformed("layouts", f"{len(prepared.layouts)} bytes", f"of {LAYOUT_BYTES} bytes for each bucket")
    workload = Workload(
        layers=tuple(
            Layer(
                shorten(x.name),
                x.forward_flops,
                float(x.parameter_bytes),
                float(x.activation_bytes),
                float(x.kept_bytes),
                float(x.working_bytes),
            )
            for x in layers
        ),
        micro_batches=micro_batches,
        optimizer_bytes_per_parameter_byte=prepared.workload.optimizer_bytes_per_parameter_byte,
        own_bytes_per_parameter_byte=prepared.workload.own_bytes_per_parameter_byte,
        copy_bytes_per_parameter_byte=prepared.workload.copy_bytes_per_parameter_byte,
    )
    return Described(
        workload=as_the_run_allows(workload, run),
        data_fingerprint=prepared.data_fingerprint.hex(),
        training_samples=prepared.training_samples,
        evaluation_samples=prepared.evaluation_samples,
        unigram_entropy=prepared.unigram_entropy,
        tokens_per_sample=prepared.tokens_per_sample,
        buckets=prepared.buckets,
        weights_fingerprint=prepared.weights_fingerprint.hex(),
        layouts=prepared.layouts.hex(),
    )


def check_pins(described: Described, trust: Trust) -> None:
    """Raises Refused if a node would train something else than the run file pins."""
    for what, mine, pinned, reason in (
        ("data", described.data_digest, trust.data, wire.DATA_DIFFERS),
        ("workload", described.workload_digest, trust.workload, wire.WORKLOAD_DIFFERS),
    ):
        if pinned not in ("", mine):
            raise Refused(
                reason,
                f"what this node read has the digest {mine}, and the run file pins trust.{what} = {pinned}; all nodes need the "
                f"same files and versions",
            )


def check_agrees(mine: Described, run: Described) -> None:
    """Raises Refused if a node would train something else than the first one that prepared, or counts memory otherwise. What its
    layers keep and work with may differ somewhat, as that depends on versions, and at will where either node could only guess:
    it changes no result, and the run goes by what the first one said."""
    for name in ("data_fingerprint", "training_samples", "evaluation_samples", "tokens_per_sample"):
        if getattr(mine, name) != getattr(run, name):
            raise Refused(
                wire.DATA_DIFFERS,
                f"{name} is {getattr(mine, name)} here and {getattr(run, name)} on the other nodes; all nodes need the same "
                f"files (for python-stdlib: the same Python version, for tokenizers and hub data: the same revision)",
            )
    if differs := _weights_differ(mine.weights_fingerprint, run.weights_fingerprint):
        raise Refused(
            wire.WORKLOAD_DIFFERS,
            f"model.pretrained: the weights here are not those that the other nodes have ({differs}); all nodes need the same "
            "files: copy the folder here again, or name a revision",
        )
    if mine.buckets != run.buckets or len(mine.workload.layers) != len(run.workload.layers):
        raise _workload_differs("layers", len(mine.workload.layers), len(run.workload.layers))
    if run.layouts and mine.layouts != run.layouts:
        bucket = next(i for i in range(run.buckets) if mine.layout_of(i) != run.layout_of(i))
        raise _workload_differs(f"the layout of bucket {bucket}", mine.layout_of(bucket), run.layout_of(bucket))
    costs: dict[str, Any] = {"kept_bytes": None, "working_bytes": 0.0}
    if is_older(run):
        costs |= {"forward_flops": 0.0, "activation_bytes": 0.0}
    for ours, theirs in zip(mine.workload.layers, run.workload.layers, strict=True):
        mine_of, run_of = (replace(layer, **costs) for layer in (ours, theirs))
        if mine_of != run_of:
            raise _workload_differs(f"layer {theirs.name}", mine_of, run_of)
    if is_older(run):
        return
    for part in ("optimizer", "own", "copy"):
        ratio = f"{part}_bytes_per_parameter_byte"
        if getattr(mine.workload, ratio) != getattr(run.workload, ratio):
            raise _workload_differs(ratio, getattr(mine.workload, ratio), getattr(run.workload, ratio))
    if _is_guessed(mine) or _is_guessed(run):
        return
    for ours, theirs in zip(mine.workload.layers, run.workload.layers, strict=True):
        for field in ("kept_bytes", "working_bytes"):
            small, large = sorted((getattr(ours, field), getattr(theirs, field)))
            if large > MOST_APART * max(small, LEAST_COMPARED):
                name = f"{field} of layer {theirs.name}"
                raise _workload_differs(name, getattr(ours, field), getattr(theirs, field))


def is_older(run: Described) -> bool:
    """Whether an older version described the run (protocol 8 and before): it does not say what layers keep, and counted what
    they send in other ways."""
    return any(layer.kept_bytes is None for layer in run.workload.layers)


def _weights_differ(mine: str, run: str) -> str:
    """In what weights differ by their fingerprints (control.proto, Prepared), or empty. What an older version says ends before
    the values."""
    if mine[:64] != run[:64]:
        return "their config.json, or the names, types and shapes of their tensors, differ"
    both = mine[64:] and run[64:]
    return "their values differ: those of another revision, or of another training" if both and mine != run else ""


def _is_guessed(described: Described) -> bool:
    """Whether a node could not follow the model's code, and told what is usual: no layer that is measured works with nothing."""
    return all(
        layer.kept_bytes == KEPT_PER_OUTPUT_BYTE * layer.activation_bytes and not layer.working_bytes
        for layer in described.workload.layers
    )


def check_links(report: wire.LinkReport, reporter: str, known: Collection[str]) -> tuple[Link, ...]:
    """The measured links from and to the reporter. Those of nodes that have left meanwhile are dropped. Raises Refused."""
    if len(report.links) > 2 * MAX_NODES:
        raise malformed("links", len(report.links), f"at most {2 * MAX_NODES} of them")
    if len({(link.source, link.destination) for link in report.links}) < len(report.links):
        raise malformed("links", len(report.links), "each once")
    links = []
    for link in report.links:
        if link.source == link.destination or reporter not in (link.source, link.destination):
            raise malformed("link", f"{link.source} to {link.destination}", "from or to the node that reports it")
        _number("latency_seconds", link.latency_seconds, 0, 3600)
        _number("bandwidth", link.bandwidth, 0, MOST_BANDWIDTH)
        if link.source in known and link.destination in known:
            problem = shorten(link.problem)
            way = _direct(link.way) if link.source == reporter else ""
            links.append(Link(link.source, link.destination, link.latency_seconds, link.bandwidth, problem, way))
    return tuple(links)


def check_connection(report: wire.LinkReport) -> tuple[float | None, float | None]:
    """The bandwidth of the reporter's connection, up and down, in bytes per second; None: not measured. Raises Refused."""
    _number("up", report.up, 0, MOST_BANDWIDTH)
    _number("down", report.down, 0, MOST_BANDWIDTH)
    return report.up or None, report.down or None


def check_flops(flops: float, field: str = "device.flops") -> None:
    """Raises Refused for a speed that no device has."""
    _number(field, flops, 1.0, MOST_FLOPS)


def check_vote(vote: wire.StepReady, buckets: int) -> None:
    """Raises Refused for a vote that cannot be counted; ``buckets``: how many there are. Numbers that are not finite pass: see
    `is_finite`."""
    check_digest(vote.state_digest)
    check_states(vote.states, buckets)
    if vote.squared_gradient_norm < 0:
        raise malformed("squared_gradient_norm", vote.squared_gradient_norm, "0 or more")
    _number("compute_seconds", vote.compute_seconds, 0, 1e7)
    _number("wait_seconds", vote.wait_seconds, 0, 1e7)
    if len(vote.arrived) > MAX_NODES:
        raise malformed("arrived", len(vote.arrived), f"at most {MAX_NODES} entries")
    for arrived in vote.arrived:
        _number("arrived.seconds", arrived.seconds, 0, 1e7)
        _number("arrived.bytes", arrived.bytes, 1, 1e15)
    if len({arrived.source for arrived in vote.arrived}) < len(vote.arrived):
        raise malformed("arrived.source", [arrived.source for arrived in vote.arrived[:20]], "each once")
    if len(vote.losses) > MOST_MICRO_BATCHES or not is_finite(*vote.losses):
        raise malformed("losses", list(vote.losses[:20]), f"at most {MOST_MICRO_BATCHES} finite numbers")


def check_clipped(vote: wire.StepReady, node: str, plan: Plan, *, is_open: bool) -> None:
    """Raises Refused for what the node cannot have clipped: only where members are strangers does anybody clip, and only what
    others add. What is said of this ends the audit of the node's own sums."""
    if vote.clipped and not is_open:
        raise malformed("clipped", len(vote.clipped), 'empty: only with trust.mode = "open" are gradients clipped')
    named = [clipped.node for clipped in vote.clipped]
    if len(set(named)) < len(named) or not set(named) <= set(plan.nodes) - {node}:
        raise malformed("clipped.node", named[:20], "other nodes of the plan, each once")
    for clipped in vote.clipped:
        if not clipped.worst > 1:
            raise malformed("clipped.worst", clipped.worst, "above 1")


def check_digest(digest: bytes, field: str = "state_digest") -> None:
    """Raises Refused for what is no digest of a state. Its length counts: several are hashed together, one after the other."""
    if len(digest) != DIGEST_BYTES:
        raise malformed(field, digest[:80].hex(), f"a digest of {DIGEST_BYTES} bytes")


def check_states(
    states: Collection[wire.BucketState],
    buckets: int,
    givers: Callable[[int], Collection[str]] = lambda _: (),
    due: Collection[int] = (),
) -> dict[int, StateTold]:
    """What a node says of the state that it holds, by bucket. Donors that are none of the bucket's ``givers`` are left out.
    Raises Refused for buckets that do not exist or come twice, or if one that is ``due`` is missing."""
    if len({state.bucket for state in states}) < len(states):
        raise malformed("states", len(states), "of different buckets")
    told: dict[int, StateTold] = {}
    for state in states:
        if state.bucket >= buckets:
            raise malformed("states.bucket", state.bucket, f"below {buckets}")
        check_digest(state.digest, "states.digest")
        donors = sorted(set(state.donors[:MOST_DONORS]).intersection(givers(state.bucket)))
        told[state.bucket] = StateTold(state.digest.hex(), tuple(donors))
    if missing := set(due) - told.keys():
        raise malformed("states", f"nothing of bucket {min(missing)}", "the digest of every bucket of its stage")
    return told


def is_finite(*values: float) -> bool:
    """Whether sums over all nodes of a plan cannot overflow: larger values count as infinite."""
    return all(abs(value) <= MOST_SUMMED for value in values)


def check_progress(progress: wire.Progress, plan: Plan, node: str) -> None:
    """Raises Refused for micro-batches that are not the node's."""
    mine = micro_batches_of(plan)[node]
    for field in ("activations", "gradients", "finished"):
        told = getattr(progress, field)
        if len(told) > len(mine) or not set(mine).issuperset(told):
            raise malformed(f"progress.{field}", list(told[:20]), f"among the node's own, {list(mine[:20])}")


def check_lost(lost: Sequence[int], layers: int) -> None:
    """Raises Refused for layers that nobody holds, or that are named twice."""
    if len(set(lost)) < len(lost) or not set(range(layers)).issuperset(lost):
        raise malformed("lost", list(lost[:20]), f"different layers below {layers}")


def check_codecs(told: Collection[wire.LinkCodec], plan: Plan, node: str, network: Network) -> Codecs:
    """The codecs of what the node sends under the plan. Raises Refused for a destination outside the plan, or named twice, and
    for a codec that the run does not use."""
    if len(told) > len(TENSORS) * len(plan.nodes):
        raise malformed("codecs", len(told), f"at most {len(TENSORS)} for each node of the plan")
    codecs: dict[str, dict[str, str]] = {}
    for link in told:
        if link.destination == node or link.destination not in plan.nodes:
            raise malformed("codecs.destination", link.destination, "another node of the plan")
        if link.tensors not in TENSORS or link.tensors in codecs.setdefault(link.destination, {}):
            raise malformed("codecs.tensors", link.tensors, f"one of {', '.join(TENSORS)}, each once")
        if link.codec not in (allowed := allowed_codecs(network, link.tensors)):
            raise malformed("codecs.codec", link.codec, f"one that the run allows: {', '.join(allowed)}")
        codecs[link.destination][link.tensors] = link.codec
    return codecs


def check_parts(message: wire.SnapshotParts, buckets: int, digest_bytes: int = DIGEST_BYTES) -> None:
    """Raises Refused for parts of a snapshot that do not exist, or come twice."""
    if len({part.bucket for part in message.parts}) < len(message.parts):
        raise malformed("parts", len(message.parts), "of different buckets")
    for part in message.parts:
        if part.bucket >= buckets:
            raise malformed("parts.bucket", part.bucket, f"below {buckets}")
        if len(part.digest) != digest_bytes:
            raise malformed("parts.digest", part.digest.hex(), f"a digest of {digest_bytes} bytes")
        if bool(part.nonce) != (message.destination == wire.CHECKPOINT) or (
            part.nonce and not _NONCE.fullmatch(part.nonce)
        ):
            raise malformed("parts.nonce", part.nonce, "32 hexadecimal digits in a checkpoint, and nothing on disks")
        _number("parts.size_bytes", part.size_bytes, 0, 1 << 50)


def check_own_layers(message: wire.SnapshotParts, own: tuple[int, int], layers: int) -> None:
    """Raises Refused for parts of other layers than the node's ``own``. Buckets from number ``layers`` on are used by several."""
    strange = [part.bucket for part in message.parts if part.bucket < layers and part.bucket not in range(*own)]
    if strange:
        raise malformed("parts.bucket", strange[0], f"of the node's layers, {own[0]} to {own[1] - 1}")


def _direct(way: str) -> str:
    if way not in _WAYS:
        raise malformed("way", way, f"one of {', '.join(_WAYS[1:])}, or nothing")
    return way


def _number(field: str, value: float, least: float, most: float) -> None:
    if not (math.isfinite(value) and least <= value <= most):
        raise malformed(field, value, f"a finite number from {least:g} to {most:g}")


def _workload_differs(field: str, mine: object, theirs: object) -> Refused:
    return Refused(
        wire.WORKLOAD_DIFFERS,
        f"{field} is {mine} here and {theirs} on the other nodes; use the same versions of transformers and torch everywhere",
    )
