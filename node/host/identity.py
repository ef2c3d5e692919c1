"""The names of the nodes on this machine, each with a slot in the user's state folder, kept across restarts.

A process has its slot while it runs. So a restarted node gets its old name. A second node gets another name, and the same one
each time.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
from pathlib import Path

from dtfm.file_lock import try_lock
from dtfm.protos.identity.access import MOST_NAMES_OF_A_KEY
from dtfm.protos.identity.private_files import NAME_A_STATE_FOLDER, state_folder

MOST_HOST_CHARACTERS = 40


def take_name(slot: str = "") -> str:
    """A name that is this process's from now on: the name of ``slot`` (letters and digits), or of the first free slot. Raises
    ValueError if the slot, or all slots, are in use, or if no name can be remembered."""
    folder = state_folder()
    slots = [slot] if slot else [str(number) for number in range(1, MOST_NAMES_OF_A_KEY + 1)]
    try:
        machine = _machine(folder / "identity")
        for each in slots:
            if try_lock(folder / "slots" / each) is not None:
                return machine if each == "1" else f"{machine}-{each}"
    except OSError as error:
        raise ValueError(f"nothing can be kept in {folder} ({error.strerror}); {NAME_A_STATE_FOLDER}") from None
    except ValueError as problem:
        raise ValueError(f"this node's name cannot be remembered ({problem}); {NAME_A_STATE_FOLDER}") from None
    raise ValueError(
        f"{slot or 'each of the names for nodes on this machine'} is in use by another dtfm-node; end one, or give a name with "
        f"--id NAME"
    )


def _machine(path: Path) -> str:
    """The first node's name; the other nodes' names begin with it. Drawn once per machine and user."""
    if not path.exists():
        host = re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname().partition(".")[0])[:MOST_HOST_CHARACTERS].strip("-")
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        drawn = path.with_name(f".identity-{secrets.token_hex(8)}")
        drawn.write_text(f"{host or 'node'}-{secrets.token_hex(2)}\n")
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.link(drawn, path)
        drawn.unlink()
    return path.read_text().strip()
