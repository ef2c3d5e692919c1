"""Checks that a bucket's file is the one that the run has written."""

from __future__ import annotations

from blake3 import blake3

from dtfm.coordinator.command.weights.stored import Stored
from dtfm.coordinator.service.checkpoint.checkpoint_folder import state_of_weights
from dtfm.coordinator.service.checkpoint.manifest import BucketFile, CheckpointError
from dtfm.protos.bucket_layout import OPTIMIZER


class NotTheLogs(CheckpointError):
    """The files in the storage differ from the run's log."""


class BucketCheck:
    """Checks a bucket's file as it comes, piece by piece. It must be the manifest's file, with the state that its trainers
    agreed on. ``state``: the digest (hex) of that state; empty: it is not known."""

    def __init__(self, stored: Stored, bucket: BucketFile, state: str) -> None:
        self._path, self._bucket, self._state = stored.path, bucket, state
        self._whole, self._at = blake3(), 0
        found = [(each.begin, each.end) for each in stored.tensors if each.name.startswith(OPTIMIZER)]
        begins = [0] if bucket.moments else [0, *(begin for begin, _ in found)]
        self._ranges = [*zip(begins, [*begins[1:], stored.size - stored.data_begin], strict=True)]
        self._begin = stored.data_begin
        self._tensors = [blake3() for _ in begins]
        self._as_nodes_write = bool(bucket.moments) or found == self._ranges[1:]

    def add(self, piece: bytes) -> None:
        """The next piece; b"" after the last one. Raises CheckpointError."""
        if not piece:
            self._finish()
            return
        self._whole.update(piece)
        for (begin, end), digest in zip(self._ranges, self._tensors, strict=True):
            before = self._begin - self._at
            digest.update(memoryview(piece)[max(0, before + begin) : max(0, before + end)])
        self._at += len(piece)

    @property
    def state(self) -> str:
        """The digest of the state that has come, as nodes take it (Bucket.digest): the BLAKE3 (hex) of two BLAKE3s, of its
        parameters and of the rest. Empty: the tensors do not lie as nodes write them."""
        if self._bucket.moments:
            return state_of_weights(self._tensors[0].digest(), self._bucket.moments)
        whole = blake3(b"".join(digest.digest() for digest in self._tensors)).hexdigest()
        return whole if self._as_nodes_write else ""

    def _finish(self) -> None:
        if self._at != self._bucket.bytes or self._whole.hexdigest() != self._bucket.blake3:
            raise CheckpointError(f"{self._path} is damaged (its BLAKE3 differs); use an older checkpoint")
        if self._state not in ("", self.state):
            raise NotTheLogs(
                f"{self._path} is whole, but not the state that its trainers agreed on: its writer has made it up. Use an older "
                "checkpoint"
            )
