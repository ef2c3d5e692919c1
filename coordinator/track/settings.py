"""The part of a run file that trackers show: how the run learns. Places are left out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dtfm.coordinator.view.published import for_anybody, for_members

SHOWN = ("seed", "model", "data", "train", "network", "trust")
"""Keys and tables to show. Others say where things are, what they cost, or whom to tell."""
_PLACE = re.compile(r"^([A-Za-z][\w+.-]*:/|[/~.]|.*://)")
HIDDEN = "(place hidden)"


def settings_of(run: Mapping[str, Any]) -> dict[str, Any]:
    """The run's settings for trackers, without addresses, paths and URLs."""
    return {key: _shown(for_members(run[key])) for key in SHOWN if key in run}


def _shown(value: Any) -> Any:
    match value:
        case dict():
            return {str(key): _shown(each) for key, each in value.items()}
        case list():
            return [_shown(each) for each in value]
        case str():
            return HIDDEN if _PLACE.match(value) else for_anybody(value)
    return value
