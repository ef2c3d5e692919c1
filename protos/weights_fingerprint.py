"""A fingerprint of a published model's files. The nodes of a run compare it, and an export that merges an adapter with the model
checks it again.

The first half is of the files' descriptions, the second half of some of their bytes. If a run begins with an adapter, the
adapter's fingerprint follows the model's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from blake3 import blake3

PIECE_BYTES = 4096
"""The most bytes that a fingerprint takes from a tensor."""
MOST_PIECES = 4096
"""The most tensors in a fingerprint. Models with a tensor for each expert may have more tensors; the fingerprint takes some of
them."""
MODEL_BYTES = 64
"""The length of a model's fingerprint, before that of the adapter."""

Described = list[tuple[str, int, bytes]]
"""By file, its name, its size in bytes, and the text that describes its content. The files are config.json, the index if there is
one, and the files of weights in order of their names. The headers describe these."""


def digest_of_files(files: Described) -> bytes:
    """The digest of the files' descriptions."""
    digest = blake3()
    for name, size, text in files:
        digest.update(f"{name} {size} ".encode()).update(text)
    return digest.digest()


def picked_pieces(sizes: Mapping[str, int], seed: int) -> list[tuple[str, int, int]]:
    """The pieces of tensors that ``seed`` picks: the tensor's name, and the piece's first byte and the byte past its last one.
    ``sizes``: each tensor's bytes."""
    chance = {name: int.from_bytes(blake3(f"{seed} {name}".encode()).digest()) for name in sizes}
    found: list[tuple[str, int, int]] = []
    for name in sorted(sorted(chance, key=chance.__getitem__)[:MOST_PIECES]):
        size = min(PIECE_BYTES, sizes[name])
        begin = chance[name] % (sizes[name] - size + 1)
        found.append((name, begin, begin + size))
    return found


def digest_of_pieces(pieces: Iterable[tuple[str, bytes]]) -> bytes:
    """``pieces``: each tensor's name and its picked piece, in their order."""
    digest = blake3()
    for name, piece in pieces:
        digest.update(f"{name} {len(piece)} ".encode()).update(piece)
    return digest.digest()
