"""Writes a checkpoint as a folder that transformers' ``from_pretrained`` loads, or peft's if the run trains an adapter.

The folder has the weights, without the optimizer's state, and the model's own files (configuration and tokenizer).
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
from blake3 import blake3

from dtfm.coordinator.command.client import ask, open_way, told
from dtfm.coordinator.command.weights.base import Base, open_base
from dtfm.coordinator.command.weights.check import BucketCheck, NotTheLogs as NotTheLogs
from dtfm.coordinator.command.weights.formats import Format
from dtfm.coordinator.command.weights.merging import adapter_in, merged_parts
from dtfm.coordinator.command.weights.older_names import as_before, family_in
from dtfm.coordinator.command.weights.shards import Part, write_shards
from dtfm.coordinator.command.weights.stored import Stored, look_at, pieces
from dtfm.coordinator.log.events import CheckpointFailed
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.service.checkpoint.adapter_file import checked_config, has_adapter
from dtfm.coordinator.service.checkpoint.checkpoint_folder import check_layout
from dtfm.coordinator.service.checkpoint.checkpoint_place import newest as newest
from dtfm.coordinator.service.checkpoint.manifest import BucketFile, CheckpointError, Manifest, manifest_and_digest
from dtfm.coordinator.view.model_card import CARD, Card, card_of
from dtfm.protos import control_pb2 as wire, coordinator_disk
from dtfm.protos.bucket_layout import OPTIMIZER
from dtfm.protos.checkpoint_names import BUFFERS, MANIFEST
from dtfm.protos.published_files import ADAPTER, ADAPTER_CONFIG, INDEX, in_peft
from dtfm.protos.run_file.run_file import RunFile, parse_run
from dtfm.protos.weights_fingerprint import MODEL_BYTES

SHARD_BYTES = 1 << 30
"""Least size of a file of weights, except the last one."""

MAX_MODEL_FILE_BYTES = 64 << 20
"""Largest configuration or tokenizer file."""


async def newest_of(where: str) -> tuple[Ledger, str]:
    """Has the coordinator fetch the weights after the current step from the nodes, unless it has the last step's weights.
    Returns the run's ledger, and the URL of that checkpoint. Raises ValueError."""
    reply: wire.Done = await ask(where, "Steer", wish="SAVE")
    print(f"{reply.sentence}.", file=sys.stderr)
    known = 0  # the last event when this was asked for
    async for so_far in told(where):
        ledger = so_far.ledger
        if ledger.copies.checkpoint_step >= reply.step:
            break
        known, last = known or so_far.sequence, so_far.recent[-1] if so_far.recent else None
        if last is not None and last.sequence > known and isinstance(failed := last.event, CheckpointFailed):
            raise CheckpointError(failed.narrate())
    else:
        raise CheckpointError(f"the coordinator has ended before the weights of step {reply.step} were there")
    folder = ledger.copies.checkpoints[ledger.copies.checkpoint_step].folder
    if not fsspec.url_to_fs(folder)[0].exists(folder):
        coordinator_disk.LINE.lead_to(await open_way(where))
        folder = parse_run(ledger.run, "the log").as_nodes_reach(folder)
    return ledger, folder


def logged_checkpoint(ledger: Ledger, store: str) -> str:
    if not ledger.copies.checkpoints:
        raise CheckpointError(f"{store} names no checkpoint; give one with --checkpoint")
    return ledger.copies.checkpoints[ledger.copies.checkpoint_step].folder


def check_target(target: Path) -> None:
    """Raises ValueError for a target in use."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is not an empty folder; give a new one")


def export_checkpoint(
    folder: str,
    target: Path,
    ledger: Ledger | None = None,
    wanted: Format | None = None,
    on_infinite: Callable[[Mapping[str, int]], None] = lambda _: None,
) -> int:
    """Writes the checkpoint at ``folder`` (an fsspec URL) into the new folder ``target``; returns its step.

    The weights are in the format ``wanted``, or in their own. ``on_infinite`` gets, by tensor, how many numbers are too large
    for the format, if any are. Leaves nothing behind when it fails. Raises CheckpointError for a checkpoint that is incomplete
    or damaged, NotTheLogs if the run's ``ledger`` has another checkpoint of this step, and ValueError for a target in use.
    """
    check_target(target)
    manifest, digest = manifest_and_digest(folder)
    states = _agreed_states(folder, manifest, digest, ledger) if ledger is not None else ()
    described = ledger.described if ledger is not None else None
    layout_of = described.layout_of if described is not None else lambda _: ""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{target.name}-", dir=target.parent, ignore_cleanup_errors=True
        ) as name:
            partial, (filesystem, path) = Path(name), fsspec.url_to_fs(folder)
            _copy_model_files(filesystem, path, partial)
            is_adapter = has_adapter(manifest.run)
            if is_adapter:
                _name_base(partial, manifest.run)
            if wanted is not None:
                _say_format(partial, wanted)
            parts = _parts(filesystem, path, manifest.buckets, states, layout_of, family_in(partial))
            if is_adapter:
                written = write_shards(
                    [each for part in parts for each in _as_peft(part)], partial, wanted, math.inf, ADAPTER
                )
            else:
                written = write_shards(parts, partial, wanted, SHARD_BYTES)
            card = replace(_card(manifest, digest, ledger), files=written.files, command=_command(wanted))
            (partial / CARD).write_text(card.text(), encoding="utf-8")
            os.chmod(partial, 0o755)
            partial.replace(target)
    except OSError as error:
        raise CheckpointError(f"cannot export {folder} to {target}: {error}") from None
    if written.infinite:
        on_infinite(written.infinite)
    return manifest.step


def export_merged(
    folder: str,
    target: Path,
    ledger: Ledger | None = None,
    wanted: Format | None = None,
    on_infinite: Callable[[Mapping[str, int]], None] = lambda _: None,
) -> int:
    """Writes the model merged with the adapter in the checkpoint at ``folder``; otherwise like export_checkpoint.

    Without ``wanted`` the numbers are in the model's own formats. Also raises CheckpointError if the run trains no adapter, if
    this machine cannot read the model, or if its files differ from those that the nodes have read.
    """
    check_target(target)
    manifest, digest = manifest_and_digest(folder)
    if not has_adapter(manifest.run):
        raise CheckpointError("--merged is for runs with [adapter], and this run trains the whole model; leave it out")
    run = parse_run(manifest.run, folder)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{target.name}-", dir=target.parent, ignore_cleanup_errors=True
        ) as name:
            adapter_folder, partial = Path(name, "adapter"), Path(name, "model")
            export_checkpoint(folder, adapter_folder, ledger)
            base = open_base(run, str(json.loads((adapter_folder / ADAPTER_CONFIG).read_bytes()).get("revision") or ""))
            parts = merged_parts(base, adapter_in(adapter_folder))
            _check_base(base, run, ledger)
            partial.mkdir()
            for each in adapter_folder.iterdir():
                if each.name not in (ADAPTER_CONFIG, f"{ADAPTER}.safetensors", CARD):
                    each.replace(partial / each.name)
            for file, content in base.text_files():
                (partial / file).write_bytes(content)
            if wanted is not None:
                _say_format(partial, wanted)
            written = write_shards(parts, partial, wanted, SHARD_BYTES)
            command = _command(wanted, merged=True)
            card = replace(_card(manifest, digest, ledger), files=written.files, command=command, merged=True)
            (partial / CARD).write_text(card.text(), encoding="utf-8")
            partial.replace(target)
    except OSError as error:
        raise CheckpointError(f"cannot merge {folder} into {target}: {error}") from None
    if written.infinite:
        on_infinite(written.infinite)
    return manifest.step


def _check_base(base: Base, run: RunFile, ledger: Ledger | None) -> None:
    """Raises NotTheLogs if the nodes have read another model than ``base``."""
    agreed = ledger.described.weights_fingerprint if ledger is not None and ledger.described is not None else ""
    if agreed and agreed[: 2 * MODEL_BYTES] != base.fingerprint(run.seed):
        raise NotTheLogs(
            f"the files of {base.name} are not those beside which the run has trained its adapter: name the revision in the run "
            "file, like NAME@REVISION, or copy the folder from a node's machine"
        )


def _card(manifest: Manifest, digest: str, ledger: Ledger | None) -> Card:
    """The model card. The log's facts about the checkpoint; without a log the manifest's."""
    if ledger is not None:
        return card_of(ledger, manifest.step, digest)
    return Card(manifest.run, manifest.run_id, manifest.step, digest)


def _command(wanted: Format | None, *, merged: bool = False) -> str:
    options = (" --merged" if merged else "") + (f" --dtype {wanted}" if wanted is not None else "")
    return f"dtfm-coordinator export{options} DIR"


def _say_format(target: Path, wanted: Format) -> None:
    """Writes the weights' format into config.json."""
    file = target / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        for settings in (config, *config.values()):
            if isinstance(settings, dict):
                settings |= {key: wanted.torch for key in ("dtype", "torch_dtype") if key in settings}
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    except FileNotFoundError:
        pass
    except (ValueError, AttributeError, RecursionError) as problem:
        raise CheckpointError(
            f"config.json of the checkpoint cannot be read: {problem}; export without --dtype"
        ) from None


def _as_peft(part: Part) -> Iterator[Part]:
    """The part with the names that peft has for its tensors. If its only tensor has several names, once under each."""
    yield _renamed(part, in_peft)
    for name in part.stored.further_names:
        yield replace(_renamed(part, lambda _, name=name: in_peft(name)), check=lambda _: None)  # type: ignore[misc]


def _renamed(part: Part, new: Callable[[str], str]) -> Part:
    names = {tensor.name: new(tensor.name) for tensor in part.tensors}
    every = tuple(replace(tensor, name=names.get(tensor.name, tensor.name)) for tensor in part.stored.tensors)
    exported = tuple(replace(tensor, name=names[tensor.name]) for tensor in part.tensors)
    return replace(part, stored=replace(part.stored, tensors=every), tensors=exported)


def _name_base(target: Path, run: Mapping[str, Any]) -> None:
    """Has adapter_config.json name the model as the run file does."""
    try:
        (target / ADAPTER_CONFIG).write_bytes(checked_config((target / ADAPTER_CONFIG).read_bytes(), run))
    except (OSError, ValueError, RecursionError) as problem:
        raise CheckpointError(f"{ADAPTER_CONFIG} of the checkpoint cannot be read: {problem}") from None


def _copy_model_files(filesystem: Any, path: str, target: Path) -> None:
    """Copies config.json and the tokenizer's files: everything but the weights, their manifest and the files that an export
    writes itself."""
    for entry in filesystem.ls(path, detail=True):
        name = str(entry["name"]).rstrip("/").rsplit("/", 1)[-1]
        written_again = (MANIFEST, INDEX, BUFFERS, CARD, f"{ADAPTER}.safetensors")
        own = name in written_again or name.startswith("bucket-") or name.endswith(".part")
        if entry["type"] != "file" or own:
            continue
        if entry["size"] > MAX_MODEL_FILE_BYTES:
            raise CheckpointError(
                f"{path}/{name} has {entry['size']} bytes; at most {MAX_MODEL_FILE_BYTES} are possible"
            )
        (target / name).write_bytes(filesystem.cat_file(entry["name"]))


def _agreed_states(folder: str, manifest: Manifest, digest: str, ledger: Ledger) -> tuple[str, ...]:
    """The digests (hex) of the checkpoint's state by bucket, as its trainers agreed on them. Empty if the log does not say."""
    logged = ledger.copies.checkpoints.get(manifest.step)
    if logged is None or manifest.run_id != ledger.run_id:
        raise NotTheLogs(
            f"the log names no checkpoint of step {manifest.step} of run {manifest.run_id}, which {folder} is"
        )
    if logged.manifest != digest:
        raise NotTheLogs(
            f"{folder}/manifest.json is not the one that the log names (its BLAKE3 is {digest} instead of {logged.manifest}): "
            "somebody has replaced it. Use an older checkpoint, and check who may write there"
        )
    return ledger.copies.digests(manifest.step)


def _parts(
    filesystem: Any,
    path: str,
    buckets: tuple[BucketFile, ...],
    states: tuple[str, ...],
    layout_of: Callable[[int], str],
    family: str,
) -> list[Part]:
    """The parts of each file to export, by the files' headers. ``family``: the model's."""
    parts: list[Part] = []
    whose: dict[str, str] = {}  # by tensor, the file that has it
    for bucket in buckets:
        stored = _looked_at(filesystem, f"{path}/{bucket.file}", bucket, layout_of(bucket.index))
        state = states[bucket.index] if bucket.index < len(states) else ""
        stored = replace(stored, tensors=as_before(stored.tensors, family))
        tensors = tuple(tensor for tensor in stored.tensors if not tensor.name.startswith(OPTIMIZER))
        for name in (*(tensor.name for tensor in tensors), *stored.further_names):
            if name in whose:
                raise CheckpointError(
                    f"{path}/{bucket.file} and {whose[name]} both have a tensor {name!r}: one of their writers has given it "
                    "another's name. Use an older checkpoint"
                )
            whose[name] = bucket.file
        parts.append(Part(stored, tensors, BucketCheck(stored, bucket, state).add))
    if filesystem.exists(f"{path}/{BUFFERS}"):
        stored = look_at(filesystem, f"{path}/{BUFFERS}", filesystem.size(f"{path}/{BUFFERS}"))
        stored = replace(stored, tensors=as_before(stored.tensors, family))
        tensors = tuple(tensor for tensor in stored.tensors if tensor.name not in whose)
        parts.append(Part(stored, tensors, lambda _: None, keeps_formats=True))
    return parts


def _looked_at(filesystem: Any, path: str, bucket: BucketFile, layout: str) -> Stored:
    """``layout``: the digest (hex) that the file's layout should have; empty: not known."""
    damaged = CheckpointError(f"{path} is damaged (its BLAKE3 differs); use an older checkpoint")
    if filesystem.size(path) != bucket.bytes:
        raise damaged
    try:
        stored = look_at(filesystem, path, bucket.bytes)
        if layout:
            size, weights = bucket.bytes - stored.data_begin, bool(bucket.moments)
            try:
                check_layout(stored.header, size, layout, path, bucket.index, weights=weights)
            except CheckpointError as error:
                raise NotTheLogs(str(error), bucket.index) from None
    except CheckpointError:
        whole = blake3()
        for piece in pieces(filesystem, path):
            whole.update(piece)
        if whole.hexdigest() != bucket.blake3:
            raise damaged from None
        raise
    return stored
