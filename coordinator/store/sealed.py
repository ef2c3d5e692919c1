"""Encrypts bytes so that only a passphrase opens them. scrypt makes a key from the passphrase, and AES-GCM encrypts with that
key, part by part.

A sealed file is a head (MAGIC and a salt), then the parts, each with its tag of 16 bytes. A part's nonce has its number, and
whether it is the last. The head is signed with each part. So no part can be left out, moved, or taken from another file.
"""

from __future__ import annotations

import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

MAGIC = b"dtfm sealed 1\n"
LEAST_PASSPHRASE = 12
"""The least number of characters."""
PART_BYTES = 16 << 20
_SALT_BYTES, _TAG_BYTES = 16, 16
_COST = 1 << 17
"""The cost of scrypt: with blocks of 8, a guess takes 128 MiB and about half a second."""


def seal(content: bytes, passphrase: bytes, name: str) -> bytes:
    """``content`` so that only the ``passphrase`` opens it, and only under this ``name``."""
    head = MAGIC + os.urandom(_SALT_BYTES)
    key, parts = (
        _key(passphrase, head),
        [content[at : at + PART_BYTES] for at in range(0, len(content), PART_BYTES)] or [b""],
    )
    sealed = [
        key.encrypt(_nonce(number, number == len(parts) - 1), part, _signed(head, name))
        for number, part in enumerate(parts)
    ]
    return b"".join([head, *sealed])


def unseal(sealed: bytes, passphrase: bytes, name: str) -> bytes:
    """The content that `seal` got. Raises ValueError, with a text to follow the file's name, if the file is damaged or the
    passphrase is wrong."""
    size = len(MAGIC) + _SALT_BYTES
    head, rest = sealed[:size], sealed[size:]
    if not head.startswith(MAGIC) or len(head) < size or not rest:
        raise ValueError("is no encrypted part of a backup")
    step = PART_BYTES + _TAG_BYTES
    key, parts = _key(passphrase, head), [rest[at : at + step] for at in range(0, len(rest), step)]
    try:
        opened = [
            key.decrypt(_nonce(number, number == len(parts) - 1), part, _signed(head, name))
            for number, part in enumerate(parts)
        ]
    except InvalidTag:
        raise ValueError("does not open: it is damaged, or was encrypted with another passphrase") from None
    return b"".join(opened)


def _key(passphrase: bytes, head: bytes) -> AESGCM:
    return AESGCM(Scrypt(salt=head[len(MAGIC) :], length=32, n=_COST, r=8, p=1).derive(passphrase))


def _nonce(number: int, is_last: bool) -> bytes:
    """A part's nonce. No two nonces of a file are equal, and a file has a key of its own."""
    return number.to_bytes(11) + bytes([is_last])


def _signed(head: bytes, name: str) -> bytes:
    return head + name.encode()
