"""The trackers to which a run's curves can be written, and how one of them is named: "tensorboard:DIR"."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from dtfm.protos.places import expanded

Kind = Literal["tensorboard", "wandb", "trackio"]

MOST_TRACKERS = 8
"""Of one run."""
_PLACES = {"tensorboard": "DIR", "wandb": "PROJECT", "trackio": "SPACE"}
_PROJECT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,95}/)?[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


@dataclass(frozen=True, slots=True)
class Destination:
    """A place at a tracker. ``place``: an absolute folder; PROJECT or ENTITY/PROJECT; a local PROJECT or OWNER/SPACE."""

    kind: Kind
    place: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.place}"


def read_destination(text: str) -> Destination:
    """The destination that ``text`` names. Raises ValueError, to follow its key's name or the option's."""
    kind, _, place = text.partition(":")
    known = [each for each in get_args(Kind) if each == kind]
    if not known:
        forms = [f'"{each}:{what}"' for each, what in _PLACES.items()]
        raise ValueError(f"names no tracker that is known: {text!r}; give {', '.join(forms[:-1])} or {forms[-1]}")
    if kind != "tensorboard":
        if not _PROJECT.fullmatch(place):
            raise ValueError(
                f"names no project: {text!r}; give one of letters, digits, dots, dashes and underscores, like "
                f'"{kind}:stories" or "{kind}:OWNER/stories"'
            )
        return Destination(known[0], place)
    if not place or "://" in place or "\0" in place or len(place) > 4096:
        raise ValueError(f'names no folder: {text!r}; give one of this machine, like "tensorboard:curves"')
    return Destination(known[0], str(expanded(place).absolute()))
