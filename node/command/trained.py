"""Where a trained model is on this machine."""

from __future__ import annotations

from pathlib import Path

from dtfm.protos.checkpoint_names import MANIFEST, step_of

_RUNS = "dtfm-runs"


def trained_folder(what: str) -> Path:
    """The folder of the model that ``what`` names. It may name a folder of weights, a folder of checkpoints, or a run with
    checkpoints under dtfm-runs. The newest checkpoint counts. Raises ValueError."""
    named = Path(what).expanduser()
    folder = named if named.is_dir() else Path(_RUNS, what)
    if not folder.is_dir():
        runs = sorted(each.name for each in Path(_RUNS).glob("*") if each.is_dir())
        raise ValueError(
            f"there is no folder {what!r} here, and no run of this name in {_RUNS} ({', '.join(runs) or 'which has none'}); give "
            "a folder made by `dtfm-coordinator export`"
        )
    steps = [each for each in folder.iterdir() if step_of(each.name) is not None and (each / MANIFEST).is_file()]
    return max(steps, key=lambda each: step_of(each.name) or 0, default=folder)
