"""Checks of a node's description of the run's model and data, and whether two descriptions agree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dtfm.coordinator.core.refusal import Refused, check_number, require, shorten
from dtfm.coordinator.core.validation.admission import check_flops
from dtfm.coordinator.log.events import Described
from dtfm.protos import control_pb2 as wire
from dtfm.protos.bucket_layout import LAYOUT_BYTES
from dtfm.protos.printable import printable
from dtfm.protos.run_file.cluster_tables import Trust
from dtfm.protos.run_file.run_file import RunFile
from dtfm.protos.source_files import (
    DIGEST,
    MOST_DESCRIBED,
    MOST_NAME,
    MOST_RANGES,
    RANGE_DIGEST,
    Files,
    difference,
    read_file,
)
from dtfm.scheduler.model.memory import KEPT_PER_OUTPUT_BYTE, Checkpointing, OptimizerState
from dtfm.scheduler.model.workload import Layer, Workload

OTHERS = "the other nodes"
MOST_KEY = 64
MAX_LAYERS = 10_000
MAX_BUCKETS = 20_000
MOST_SNAPSHOTS = 4
MOST_APART = 2
LEAST_COMPARED = 1 << 20
"""Two nodes' counts of the memory that a layer keeps and works with may differ by up to MOST_APART times. Counts below
LEAST_COMPARED bytes are compared as LEAST_COMPARED."""


def check_prepared(prepared: wire.Prepared, run: RunFile) -> Described:
    """The model and the data, as the node prepared them. Raises Refused if a number is impossible or does not fit the run."""
    layers = prepared.layers
    require(1 <= len(layers) <= MAX_LAYERS, "layers", len(layers), f"1 to {MAX_LAYERS} of them")
    for index, layer in enumerate(layers):
        require(len(layer.name) <= 256, f"layers[{index}].name", layer.name, "at most 256 characters")
        check_number(f"layers[{index}].forward_flops", layer.forward_flops, 0, 1e24)
        check_number(f"layers[{index}].backward_flops", layer.backward_flops, 0, 1e24)
        for size in ("parameter_bytes", "activation_bytes", "kept_bytes", "working_bytes", "frozen_bytes"):
            check_number(f"layers[{index}].{size}", getattr(layer, size), 0, 1 << 50)
        check_number(f"layers[{index}].orthogonal_bytes", layer.orthogonal_bytes, 0, layer.parameter_bytes)
    require(any(layer.forward_flops for layer in layers), "layers", "no forward_flops", "some work")
    data, weights = prepared.data_fingerprint, prepared.weights_fingerprint
    require(8 <= len(data) <= 64, "data_fingerprint", data.hex(), "a digest of 8 to 64 bytes")
    empty_or_digests = not weights or 8 <= len(weights) <= 128
    require(empty_or_digests, "weights_fingerprint", weights.hex(), "empty, or digests of 8 to 128 bytes")
    samples, tokens = prepared.training_samples, prepared.tokens_per_sample
    require(samples >= 1, "training_samples", samples, "1 or more; give more data or shorter samples")
    check_number("unigram_entropy", prepared.unigram_entropy, 0, 1000)
    require(1 <= tokens <= 1 << 24, "tokens_per_sample", tokens, "1 to 2**24")
    if prepared.flops:
        check_flops(prepared.flops, "flops")
    steps, buckets, layouts = len(prepared.on_disk), prepared.buckets, len(prepared.layouts)
    require(steps <= MOST_SNAPSHOTS, "on_disk", steps, f"of at most {MOST_SNAPSHOTS} steps")
    fits = len(layers) <= buckets <= MAX_BUCKETS
    require(fits, "buckets", buckets, f"{len(layers)} (one per layer) to {MAX_BUCKETS}")
    require(layouts == LAYOUT_BYTES * buckets, "layouts", layouts, f"{LAYOUT_BYTES} bytes for each bucket")
    counted = tuple(
        Layer(
            shorten(x.name),
            x.forward_flops,
            float(x.parameter_bytes),
            float(x.activation_bytes),
            float(x.kept_bytes),
            float(x.working_bytes),
            float(x.frozen_bytes),
            float(x.orthogonal_bytes),
        )
        for x in layers
    )
    backward = sum(x.backward_flops or 2 * x.forward_flops for x in layers) / sum(x.forward_flops for x in layers)
    require(backward <= 2, "backward_flops", backward, "at most twice the forward pass's")
    return Described(
        workload=workload_of(counted, run, backward),
        data_fingerprint=data.hex(),
        training_samples=samples,
        evaluation_samples=prepared.evaluation_samples,
        unigram_entropy=prepared.unigram_entropy,
        tokens_per_sample=tokens,
        buckets=buckets,
        weights_fingerprint=weights.hex(),
        layouts=prepared.layouts.hex(),
        files=_checked_files(prepared),
    )


def _checked_files(prepared: wire.Prepared) -> Files:
    number, ranges = len(prepared.files), sum(len(file.ranges) for file in prepared.files)
    require(number <= MOST_DESCRIBED, "files", number, f"at most {MOST_DESCRIBED} of them")
    require(ranges <= MOST_RANGES * RANGE_DIGEST, "files.ranges", ranges, f"at most {MOST_RANGES * RANGE_DIGEST} bytes")
    for file in prepared.files:
        for field, most in (("key", MOST_KEY), ("name", MOST_NAME)):
            text = getattr(file, field)
            fits = 0 < len(text) <= most and printable(text, " ") == text
            require(fits, f"files.{field}", text, f"1 to {most} printable characters")
        check_number("files.size", file.size, 0, 1 << 50)
        check_number("files.range_bytes", file.range_bytes, 0, 1 << 50)
        require(len(file.digest) in (0, DIGEST), "files.digest", file.digest.hex(), f"empty, or {DIGEST} bytes")
        fits = len(file.ranges) == RANGE_DIGEST * (-(-file.size // file.range_bytes) if file.range_bytes else 0)
        require(fits, "files.ranges", len(file.ranges), f"{RANGE_DIGEST} bytes for each range")
    return tuple(map(read_file, prepared.files))


def same_data(one: Described, other: Described) -> bool:
    """Whether two nodes would train on the same samples."""
    return one.data_digest == other.data_digest


def differs_from_pins(described: Described, trust: Trust) -> Iterator[tuple[str, str, str]]:
    """The pins of the run file that differ, "data" or "workload", with the digest as described and as pinned."""
    pins = ("data", described.data_digest, trust.data), ("workload", described.workload_digest, trust.workload)
    return ((what, said, pinned) for what, said, pinned in pins if pinned not in ("", said))


def check_pins(described: Described, trust: Trust) -> None:
    """Raises Refused if a node would train other data or another workload than the run file pins."""
    for what, mine, pinned in differs_from_pins(described, trust):
        raise Refused(
            wire.DATA_DIFFERS if what == "data" else wire.WORKLOAD_DIFFERS,
            f"what this node read has the digest {mine}, and the run file pins trust.{what} = {pinned}; all nodes need the "
            f"same files and versions",
        )


def check_agrees(mine: Described, run: Described) -> None:
    """Raises Refused if a node would train another model or other data than the first node that prepared, or counts memory
    differently.

    The memory that layers keep and work with may differ somewhat, since it depends on versions. It may differ at will if either
    node could only guess. It changes no result, and the run uses the first node's numbers."""
    if not same_data(mine, run):
        raise data_differs(mine, run)
    if mine.weights_fingerprint != run.weights_fingerprint:
        differs = "their values differ: those of another revision, or of another training"
        if mine.weights_fingerprint[:64] != run.weights_fingerprint[:64]:
            differs = "their config.json, or the names, types and shapes of their tensors, differ"
        if mine.weights_fingerprint[:128] == run.weights_fingerprint[:128]:
            raise Refused(
                wire.WORKLOAD_DIFFERS,
                "adapter.pretrained: the adapter here is not the one that the other nodes have; all nodes need the same files: "
                "copy the folder here again, or name a revision",
            )
        raise Refused(
            wire.WORKLOAD_DIFFERS,
            f"model.pretrained: the weights here are not those that the other nodes have ({differs}); all nodes need the same "
            "files: copy the folder here again, or name a revision",
        )
    if mine.buckets != run.buckets or len(mine.workload.layers) != len(run.workload.layers):
        raise _workload_differs("layers", len(mine.workload.layers), len(run.workload.layers))
    if mine.layouts != run.layouts:
        bucket = next(i for i in range(run.buckets) if mine.layout_of(i) != run.layout_of(i))
        raise _workload_differs(f"the layout of bucket {bucket}", mine.layout_of(bucket), run.layout_of(bucket))
    costs: dict[str, Any] = {"kept_bytes": None, "working_bytes": 0.0}
    for ours, theirs in zip(mine.workload.layers, run.workload.layers, strict=True):
        mine_of, run_of = (replace(layer, **costs) for layer in (ours, theirs))
        if mine_of != run_of:
            raise _workload_differs(f"layer {theirs.name}", mine_of, run_of)
    if _is_guessed(mine) or _is_guessed(run):
        return
    for ours, theirs in zip(mine.workload.layers, run.workload.layers, strict=True):
        for field in ("kept_bytes", "working_bytes"):
            small, large = sorted((getattr(ours, field), getattr(theirs, field)))
            if large > MOST_APART * max(small, LEAST_COMPARED):
                name = f"{field} of layer {theirs.name}"
                raise _workload_differs(name, getattr(ours, field), getattr(theirs, field))


def data_differs(mine: Described, run: Described) -> Refused:
    """The refusal of a node that would train on other data: with the file that differs, if a file does."""
    names = ("data_fingerprint", "training_samples", "evaluation_samples", "tokens_per_sample")
    name = next((name for name in names if getattr(mine, name) != getattr(run, name)), names[0])
    differs = f"{name} is {getattr(mine, name)} here and {getattr(run, name)} on the other nodes"
    needed = (
        "all nodes need the same files (for python-stdlib: the same Python version, for hub data: the same revision)"
    )
    if file := difference(mine.files, run.files, OTHERS):
        return Refused(wire.DATA_DIFFERS, f"{file}; {needed}; {differs}")
    if mine.files and run.files:
        needed = "the files are the same, so that it is their tokens; all nodes need the same tokenizer and versions"
    return Refused(wire.DATA_DIFFERS, f"{differs}; {needed}")


def own_copy_differs(mine: Described, own: Files) -> Refused | None:
    """The refusal of a node whose files are not the coordinator's own. None: they are, as far as both have described theirs. If a
    node has files of a source that the coordinator lacks, its copy is a part, and only files of both are compared."""
    here, there = ({(file.key, file.name) for file in files} for files in (mine.files, own))
    parts = {key for key, _ in here - there}
    both = here & there
    theirs, ours = (
        tuple(file for file in files if file.key not in parts or (file.key, file.name) in both)
        for files in (mine.files, own)
    )
    file = difference(theirs, ours, "the coordinator")
    fix = "copy the coordinator's file here, or remove its copy and start it again"
    return Refused(wire.DATA_DIFFERS, f"{file}; {fix}") if file else None


def _is_guessed(described: Described) -> bool:
    """Whether a node could not follow the model's code, and reported usual values: every measured layer works with some
    memory."""
    return all(
        layer.kept_bytes == KEPT_PER_OUTPUT_BYTE * layer.activation_bytes and not layer.working_bytes
        for layer in described.workload.layers
    )


def _workload_differs(field: str, mine: object, theirs: object) -> Refused:
    return Refused(
        wire.WORKLOAD_DIFFERS,
        f"{field} is {mine} here and {theirs} on the other nodes; use the same versions of transformers and torch everywhere",
    )


BITS_PER_ELEMENT = {"auto": 8.0625, "raw16": 16.0, "i8b256": 8.0625, "i4b64": 4.25, "topk": 0.5625, "top64": 0.1640625}
"""Bits per element by codec (kernels/layout.py). If "auto" takes a gentler codec, the transfer hides under compute."""


def workload_of(layers: tuple[Layer, ...], run: RunFile, backward_per_forward: float = 2.0) -> Workload:
    """The workload of training these layers by the run file."""
    copied = run.copy_bytes_per_parameter_byte
    workload = Workload(layers, run.train.micro_batches, backward_per_forward, copy_bytes_per_parameter_byte=copied)
    return as_the_run_says(workload, run)


def as_the_run_says(workload: Workload, run: RunFile) -> Workload:
    """``workload`` with the run file's values for what nodes keep and send. These may change when a run goes on. Activations and
    their gradients share links, and count as the larger of the two."""
    checkpointing, optimizer_state = run.train.activation_checkpointing, run.train.optimizer_state
    network, bits = run.network, {"fp64": 64.0, "bf16": 16.0}.get(run.train.precision, 32.0)
    return replace(
        workload,
        checkpointing=None if checkpointing == "auto" else Checkpointing(checkpointing),
        optimizer_state=None if optimizer_state == "auto" else OptimizerState(optimizer_state),
        sent_per_activation_byte=max(_sent(network.activations, bits), _sent(network.gradients, bits)),
        sent_per_reduced_byte=_sent(network.reduction, max(bits, 32.0)),
        sent_per_exchanged_byte=_sent(network.exchange, max(bits, 32.0)),
        exchanged_with_all=network.exchanges_sparsely,
        momentum_bytes_per_parameter_byte=float(run.train.has_momentum),
        tries_outer_steps=run.train.outer_rate == "auto",
    )


def _sent(codec: str, bits: float) -> float:
    """Bytes on a link per byte of a tensor whose elements have this many ``bits``."""
    return min(1.0, BITS_PER_ELEMENT.get(codec, bits) / bits)
