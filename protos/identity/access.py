"""What this user may do at which coordinator, remembered on disk: a name, a role and the key that both belong to.

Each is a file of mode 0600 in the user's state folder, so a program that is started again, and every later command, needs no
invitation.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

from dtfm.protos.identity.private_files import NAME_A_STATE_FOLDER, read_private, state_folder, write_private

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""What a name looks like."""

MOST_NAMES_OF_A_KEY = 32
"""The number of names that one key may have in a run. A node's further ones use up no invitation."""


MOST_RUN_CHARACTERS = 64
"""Of a run's name."""


class Role(enum.StrEnum):
    """What somebody may do: see service/port/gate.py of the coordinator."""

    NODE = "node"
    OPERATOR = "operator"
    VIEWER = "viewer"


@dataclass(frozen=True, slots=True)
class Access:
    """``addresses`` and ``pin`` are the coordinator's (see Invitation). ``enrolled``: the coordinator knows the ``key`` (PEM) as
    this name's; the key is on disk before, so that it is not lost together with the answer. ``own``: this user runs the
    coordinator. ``run``: the run's name; empty: not known. ``allowed_data`` and ``allowed_modules``: what of this machine its
    operator lets this run name."""

    addresses: tuple[str, ...]
    pin: bytes
    name: str
    role: Role
    key: bytes = field(repr=False)
    enrolled: bool = False
    own: bool = False
    run: str = ""
    allowed_data: tuple[str, ...] = ()
    allowed_modules: tuple[str, ...] = ()


def keep(access: Access) -> None:
    """Remembers it, in place of what was remembered for the same name there. Raises ValueError."""
    fields = {
        "addresses": list(access.addresses),
        "authority": access.pin.hex(),
        "name": access.name,
        "role": access.role.value,
        "key": access.key.decode(),
        "enrolled": access.enrolled,
        "own": access.own,
        "run": access.run,
        "allowed_data": access.allowed_data,
        "allowed_modules": access.allowed_modules,
    }
    write_private(_file(access), json.dumps(fields, indent=1).encode(), NAME_A_STATE_FOLDER)


def other_key(access: Access) -> Access | None:
    """What `keep` would overwrite: another key of this user's with the same name there, whatever its role. Raises ValueError if
    it cannot be read."""
    try:
        there = _read(_file(access))
    except FileNotFoundError:
        return None
    return there if there.key != access.key else None


def enrolment_lock(pin: bytes) -> Path:
    """Who is enrolled there holds this file's lock, so that this user's next process finds the key."""
    return _folder() / f"{pin.hex()[:16]}.lock"


def _file(access: Access) -> Path:
    if not NAME.fullmatch(access.name):
        raise ValueError(f"{access.name[:70]!r} is no name: give 1 to 64 letters, digits, dots, dashes and underscores")
    return _folder() / f"{access.pin.hex()[:16]}-{access.name}.json"


def kept(roles: Collection[Role], pin: bytes | None = None, name: str = "") -> list[Access]:
    """What is remembered with one of these roles, the newest first; if given, only for this authority and this name. Raises
    ValueError if a file is damaged, or others than its owner may read it."""
    try:
        files = sorted(_folder().glob("*.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    except OSError:
        return []  # one was just replaced or removed, or there is no folder
    found = []
    for path in files:
        if pin is not None and not path.name.startswith(f"{pin.hex()[:16]}-"):
            continue
        try:
            access = _read(path)
        except FileNotFoundError:
            continue  # it was just removed
        if access.role in roles and name in ("", access.name) and pin in (None, access.pin):
            found.append(access)
    return found


def with_permissions(access: Access) -> Access:
    """The ``access`` with what its operator lets the run name here. A name that is new on this machine may use what the newest
    other one may. Raises ValueError as `kept` does."""
    mine = kept([access.role], access.pin, access.name)
    before = next(iter(mine or kept([Role.NODE], access.pin)), access)
    return replace(access, allowed_data=before.allowed_data, allowed_modules=before.allowed_modules)


def runs_it(pin: bytes) -> bool:
    """Whether this user runs the coordinator with this authority, and is not only one of its operators. Raises ValueError as
    `kept` does."""
    return any(access.own for access in kept([Role.OPERATOR], pin))


def _folder() -> Path:
    return state_folder() / "access"


def _read(path: Path) -> Access:
    # Here, since most who import this module want its names alone, and gRPC takes long to load.
    from dtfm.protos.connection import read_address
    from dtfm.protos.identity.credentials import is_key

    content = read_private(path)
    try:
        fields = json.loads(content)
        addresses = tuple(map(str, fields["addresses"]))
        pin, key = bytes.fromhex(fields["authority"]), str(fields["key"]).encode()
        for address in addresses:
            read_address(address)
        if not is_key(key):
            raise ValueError("its key is none")
        return Access(
            addresses,
            pin,
            str(fields["name"]),
            Role(fields["role"]),
            key,
            enrolled=fields["enrolled"] is True,
            own=fields.get("own") is True,
            run=str(fields.get("run", ""))[:MOST_RUN_CHARACTERS],
            allowed_data=tuple(map(str, fields.get("allowed_data", ()))),
            allowed_modules=tuple(map(str, fields.get("allowed_modules", ()))),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as problem:
        raise ValueError(f"{path} is damaged ({problem}); remove it, and join again with an invitation") from None
