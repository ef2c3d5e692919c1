"""The event log as curves, in TensorBoard's files."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.store.record import Record
from dtfm.installed import install_line

_TOLD = (
    ev.RunResumed,
    ev.NodeJoined,
    ev.NodeLeft,
    ev.DeviceDrifted,
    ev.PlanAdopted,
    ev.StepAborted,
    ev.CheckpointWritten,
    ev.RolledBack,
    ev.NodeQuarantined,
    ev.NodeForgiven,
    ev.RunFinished,
    ev.RunFailed,
)
"""What explains a bend in a curve."""


def points(event: ev.Event) -> dict[str, float]:
    """What an event adds to curves: by the curve's name, a value as of the event's step."""
    match event:
        case ev.StepCommitted():
            found = {"loss": event.loss, "gradient_norm": event.gradient_norm, "tokens": float(event.tokens)}
            if (speed := event.tokens_per_second) is not None:
                found |= {"seconds_per_step": event.seconds, "tokens_per_second": speed}
            return found
        case ev.Evaluated():
            return {"held_out_loss": event.loss}
    return {}


class TensorBoard:
    """Writes the files of a run into ``folder``, which `tensorboard --logdir` shows. It takes all events of a log in order."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError if the folder cannot be written, or has files of an earlier time, whose curves would overlap."""
        try:
            writer: Callable[..., Any] = import_module("tensorboardX").SummaryWriter
        except ImportError:
            install = install_line("tensorboard")
            raise ValueError(f"the package tensorboardX is not installed; install it with: {install}") from None
        if folder.exists() and any(folder.glob("*tfevents*")):
            raise ValueError(f"{folder} has TensorBoard's files already; give a new folder, or delete them")
        try:
            self._writer = writer(logdir=str(folder))
        except OSError as problem:
            raise ValueError(f"cannot write into {folder}: {problem.strerror}; give another folder") from None
        self._step = 0

    def add(self, record: Record) -> None:
        for name, value in points(record.event).items():
            self._step = record.event.step  # type: ignore[attr-defined]  # those with points have one
            self._writer.add_scalar(name, value, self._step, walltime=record.time)
        if isinstance(record.event, _TOLD):
            self._writer.add_text("events", record.event.narrate(), self._step, walltime=record.time)

    def close(self) -> None:
        self._writer.close()
