"""Checkpoints: the files of a snapshot, sent from the nodes' disks to the run's place for checkpoints.

Any node that has a bucket on disk can send it, so another node replaces one that fails or leaves. The manifest makes a
checkpoint whole. Trouble with storage accuses nobody and ends no run: files that could not be sent are tried again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from dtfm.coordinator.core.copies import disks, moving
from dtfm.coordinator.core.copies.availability import on_disk
from dtfm.coordinator.core.messages import part_message
from dtfm.coordinator.core.phases import Gathering, Pausing
from dtfm.coordinator.core.reach.machines import machines_of
from dtfm.coordinator.core.refusal import shorten
from dtfm.coordinator.core.state.copies import Upload
from dtfm.coordinator.core.state.session import Session
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.transition import ManifestDone, TidyCheckpoints, Transition, WriteManifest
from dtfm.coordinator.core.validation.files import check_moments, check_uploaded
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from dtfm.protos.checkpoint_names import BUFFERS, bucket_of, gathering_folder, step_folder
from dtfm.protos.published_files import ADAPTER_CONFIG

MOST_MODEL_FILE_BYTES = 64 << 20
"""Tokenizers have the largest files beside the buckets."""

LINE_FRACTION = 0.25
"""The fraction of its fastest link that the nodes of a machine use for a checkpoint while the run trains."""

LEAST_BANDWIDTH = 100e3
"""The bytes per second that any node is expected to send."""

PATIENCE_FACTOR = 10
"""A node may take this many times as long for its files as it should, and twice as long after each failure."""

RETRY_LEASES, LONGEST_RETRY_LEASES = 2, 60
"""After a failure, missing files are sent again after the first of these times. The time doubles up to the second."""

MOST_ATTEMPTS = 5
"""The number of attempts for a file that no connected node has on disk, or that may be damaged after the last step."""

_MODEL_FILE = re.compile(
    r"(generation_)?config\.json|tokenizer[a-z_]*\.(json|model)|(special_tokens_map|added_tokens|vocab)\.json|"
    rf"vocab\.txt|merges\.txt|[a-z_]+\.model|chat_template\.jinja|{re.escape(BUFFERS)}"
)
"""The files that a node may write beside the buckets. None of them would be loaded by transformers in place of the buckets."""


def begin(transition: Transition, step: int, parts: Mapping[int, ev.SnapshotPart]) -> None:
    """Starts to send ``parts``, the snapshot of ``step`` by bucket, from the nodes' disks to a checkpoint. Gives up the
    checkpoint under way, if there is one."""
    give_up(transition, f"the checkpoint of step {step} takes its place")
    safekeeping = transition.state.safekeeping
    run = transition.state.run
    upload = Upload(step, run.checkpoints, run.checkpoint.weights, parts)
    transition.set_safekeeping(replace(safekeeping, upload=upload, unfinished=safekeeping.unfinished | {step}))
    _ask(transition)


def moved(transition: Transition, session: Session, message: wire.Moved) -> None:
    """Files of the node have arrived, or the node could not send the rest."""
    described, upload, node = transition.state.ledger.description, transition.state.safekeeping.upload, session.node
    check_uploaded(message, described.buckets)
    mine = upload.moves.of(node) if upload is not None and upload.step == message.step else ()
    if upload is None or not mine:
        transition.log(f"ignored that {node} has sent files of step {message.step}: none is awaited from it")
        return
    has_momentum = transition.state.run.train.has_momentum
    check_moments(message, 2 + has_momentum if upload.weights else 0)
    files = {
        part.bucket: ev.CheckpointFile(part.size_bytes, part.digest.hex(), part.nonce, part.moments.hex())
        for part in message.parts
        if part.bucket in mine
    }
    sent = {bucket: ev.SnapshotPart(file.size_bytes, file.digest) for bucket, file in files.items()}
    wrong = [bucket for bucket, part in sent.items() if not upload.weights and part != upload.parts[bucket]]
    files = {bucket: file for bucket, file in files.items() if bucket not in wrong}
    upload = replace(upload, files={**upload.files, **files}, sent_by={**upload.sent_by, **dict.fromkeys(files, node)})
    moves = moving.arrived(upload.moves, node, files)
    if message.problem or wrong:
        problem = shorten(message.problem) or "it has sent another file than it has on disk"
        moves = moving.failed(moves, node, f"{node}: {problem}")
    _set(transition, replace(upload, moves=moves))
    _ask(transition)


def manifest_done(transition: Transition, done: ManifestDone) -> None:
    """The checkpoint is whole, or its manifest could not be written."""
    upload = transition.state.safekeeping.upload
    if upload is None or upload.step != done.step or not upload.finishing:
        return
    upload = replace(upload, finishing=False)
    if done.problem:
        files = {bucket: file for bucket, file in upload.files.items() if bucket != done.bucket}
        if done.bucket is None:
            _set(transition, replace(upload, files=files))
            _wait(transition, done.problem)
        else:
            moves = moving.failed(upload.moves, upload.sent_by[done.bucket], done.problem)
            _set(transition, replace(upload, files=files, moves=moves))
            _ask(transition)
        return
    _end(transition, is_whole=True)
    folder = step_folder(upload.place, done.step)
    transition.emit(ev.CheckpointWritten(done.step, folder, done.digest, upload.weights))
    tidy(transition)
    disks.tidy(transition)


def go_on(transition: Transition) -> None:
    """The rule: other nodes send the buckets of nodes that are late or have left. After a failure, missing files are tried again
    when that is due."""
    state, upload = transition.state, transition.state.safekeeping.upload
    if upload is None or state.stopped:
        return
    moves = moving.followed(upload.moves, state.members.sessions, transition.now)
    again = upload.again is not None and transition.now >= upload.again
    if again and upload.place != state.run.checkpoints:
        _end(transition)
        begin(transition, upload.step, upload.parts)
    elif again and state.is_closing and upload.attempts >= MOST_ATTEMPTS:
        # The files may be damaged: the state is written again (step/pause.py).
        give_up(transition, moves.problem or f"it is not whole after {upload.attempts} attempts")
    elif again:
        _set(transition, replace(upload, moves=replace(moves, failed=frozenset()), again=None))
        _ask(transition)
    elif moves != upload.moves:
        _set(transition, replace(upload, moves=moves))
        _ask(transition)


def is_needed(state: State, node: str) -> bool:
    """Whether a checkpoint needs this node: the node writes for it, or no other connected node has a missing file on disk. While
    the run trains, no node is kept for storage in trouble: there will be another checkpoint."""
    tally, upload = state.safekeeping.snapshot, state.safekeeping.upload
    if tally is not None and tally.checkpoint and tally.moves.of(node):
        return True
    if upload is None or (upload.is_in_trouble and not state.is_closing):
        return False
    return any(nodes == (node,) for nodes in on_disk(state, upload.step, upload.missing).values())


def most_bytes(state: State, node: str, step: int, file: str) -> int:
    """The largest size that the node may give this file of the checkpoint of ``step``, where the coordinator itself keeps
    checkpoints; 0: the node may not write the file."""
    upload, bucket = state.safekeeping.upload, bucket_of(file)
    if (
        state.stopped
        or upload is None
        or (upload.step, upload.place) != (step, state.run.own_folder)
        or (bucket or 0) not in upload.moves.of(node)
    ):
        return 0
    if bucket is None:  # a file of the model: the sender of the first bucket writes it
        # In any other run transformers would load the model that this file names.
        of_adapter = file == ADAPTER_CONFIG and state.run.adapter is not None
        return MOST_MODEL_FILE_BYTES if _MODEL_FILE.fullmatch(file) or of_adapter else 0
    return upload.parts[bucket].size_bytes


def failed(transition: Transition, step: int, reason: str) -> None:
    """There is no checkpoint of ``step``. The last one of a run is tried again after a while (step/pause.py), as nothing else
    would remain of the run."""
    due = transition.now + RETRY_LEASES * transition.state.lease
    transition.set_safekeeping(replace(transition.state.safekeeping, next_checkpoint=due))
    transition.emit(ev.CheckpointFailed(step, reason))


def give_up(transition: Transition, reason: str) -> None:
    """Abandons the checkpoint under way, if there is one; the previous one stays."""
    if (upload := transition.state.safekeeping.upload) is not None:
        _end(transition)
        failed(transition, upload.step, reason)


def place_changed(transition: Transition) -> None:
    """The run has another place for checkpoints. A checkpoint that failed at the old place is tried there."""
    safekeeping, upload = transition.state.safekeeping, transition.state.safekeeping.upload
    transition.set_safekeeping(replace(safekeeping, next_checkpoint=-math.inf))
    if upload is not None and upload.is_in_trouble:
        _set(transition, replace(upload, again=transition.now))


def tidy(transition: Transition, undone: Collection[int] = ()) -> None:
    """Deletes checkpoints: those that the run does not keep, the rest of unfinished ones that were given up, and those of
    ``undone`` steps. Readers of the folder alone would take an undone checkpoint for the newest."""
    ledger, safekeeping, run = transition.state.ledger, transition.state.safekeeping, transition.state.run
    under_way = frozenset({safekeeping.upload.step}) if safekeeping.upload is not None else frozenset[int]()
    given_up = frozenset({*safekeeping.unfinished, *undone}) - under_way
    newest = ledger.copies.checkpoint_step
    if not newest and not undone:
        return
    transition.set_safekeeping(replace(safekeeping, unfinished=under_way))
    transition.commands.append(
        TidyCheckpoints(run.checkpoints, ledger.run_id, newest, run.checkpoint.keep, under_way, given_up)
    )


def _ask(transition: Transition) -> None:
    """Has each missing bucket sent by one of the nodes that have it: the one with the least to send. When all buckets have
    arrived, has the manifest written."""
    state, upload = transition.state, transition.state.safekeeping.upload
    assert upload is not None
    if upload.finishing or upload.again is not None:
        return
    if len(upload.files) == len(upload.parts):
        _set(transition, replace(upload, finishing=True))
        folder = step_folder(upload.place, upload.step)
        files = tuple(upload.files[bucket] for bucket in sorted(upload.files))
        gathered = gathering_folder(upload.place, upload.step, state.ledger.run_id)
        transition.commands.append(WriteManifest(upload.step, folder, gathered, files))
        return
    missing = upload.missing - upload.moves.under_way
    holders = on_disk(state, upload.step, missing)
    load = {node: sum(upload.parts[b].size_bytes for b in move.buckets) for node, move in upload.moves.by_node.items()}
    chosen: dict[str, list[int]] = {}
    for bucket, nodes in holders.items():
        if able := [node for node in nodes if node not in upload.moves.failed]:
            node = min(able, key=lambda n: (load.get(n, 0), n))
            load[node] = load.get(node, 0) + upload.parts[bucket].size_bytes
            chosen.setdefault(node, []).append(bucket)
    for node, buckets in chosen.items():
        upload = _send(transition, upload, node, buckets, load[node])
    _set(transition, upload)
    if upload.moves.under_way:
        return
    problem = upload.moves.problem
    if missing - holders.keys() and upload.attempts >= MOST_ATTEMPTS:
        give_up(transition, problem or f"bucket {min(missing - holders.keys())} is no longer on any disk")
        disks.tidy(transition)
    else:
        _wait(transition, problem or f"bucket {min(missing)} is on no disk that is here")


def _send(transition: Transition, upload: Upload, node: str, buckets: Collection[int], size: float) -> Upload:
    """Has the node send these buckets too. ``size``: the bytes that it then has to send in all."""
    state = transition.state
    links, ready = state.ledger.reach.links.get(node, {}), state.ledger.ready
    line = max((link.bandwidth for link in links.values() if link.way != "loopback"), default=0.0)
    beside = (len(machine) for machine in machines_of(state.ledger, ready) if node in {ready[at] for at in machine})
    share = line / next(beside, 1)  # other nodes of its machine may be sending, too
    idle = isinstance(state.phase, Pausing | Gathering)
    rate = 0.0 if idle else max(LINE_FRACTION * share, LEAST_BANDWIDTH)
    message = wire.Move(
        step=upload.step,
        folder=state.run.as_nodes_reach(gathering_folder(upload.place, upload.step, state.ledger.run_id)),
        parts=[part_message(bucket, upload.parts[bucket], ()) for bucket in buckets],
        weights=upload.weights,
        bytes_per_second=rate,
    )
    transition.send([node], wire.CoordinatorMessage(move=message))
    seconds = size / (rate or max(share, LEAST_BANDWIDTH))
    due = transition.now + max(state.patience, PATIENCE_FACTOR * seconds) * 2 ** min(upload.attempts, 8)
    return replace(upload, moves=moving.begun(upload.moves, state.members.sessions[node], buckets, due))


def _wait(transition: Transition, problem: str) -> None:
    """No node can send the missing files now, or the manifest cannot be written. Both are tried again later."""
    upload = transition.state.safekeeping.upload
    assert upload is not None
    seconds = min(RETRY_LEASES * 2**upload.attempts, LONGEST_RETRY_LEASES) * transition.state.lease
    _set(transition, replace(upload, again=transition.now + seconds, attempts=upload.attempts + 1))
    transition.emit(ev.CheckpointFailed(upload.step, f"{problem}; it is tried again in {seconds:g} s"))


def _end(transition: Transition, *, is_whole: bool = False) -> None:
    safekeeping = transition.state.safekeeping
    assert safekeeping.upload is not None
    done = {safekeeping.upload.step} if is_whole else set[int]()
    transition.set_safekeeping(replace(safekeeping, upload=None, unfinished=safekeeping.unfinished - done))


def _set(transition: Transition, upload: Upload) -> None:
    before = transition.state.safekeeping.upload
    if before is not None and upload.moves.failed - before.moves.failed:
        transition.log(f"part of the checkpoint of step {upload.step} has not come: {upload.moves.problem}")
    transition.set_safekeeping(replace(transition.state.safekeeping, upload=upload))
