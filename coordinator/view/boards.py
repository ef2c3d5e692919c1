"""The event log as curves: in TensorBoard's files, and on Weights & Biases."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.record import Record
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


class Board(Protocol):
    """Takes all events of a log in order."""

    def add(self, record: Record) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Writes the files of a run into ``folder``, which `tensorboard --logdir` shows."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError if the folder cannot be written, or has files of an earlier time, whose curves would overlap."""
        writer: Callable[..., Any] = _package("tensorboardX", install_line("tensorboard")).SummaryWriter
        if folder.exists() and any(folder.glob("*tfevents*")):
            raise ValueError(f"{folder} has TensorBoard's files already; give a new folder, or delete them")
        try:
            self._writer = writer(logdir=str(folder))
        except OSError as problem:
            raise ValueError(f"cannot write into {folder}: {problem.strerror}; give another folder") from None
        self._step = 0

    def add(self, record: Record) -> None:
        for name, value in points(record.event).items():
            self._step = record.event.step  # type: ignore[union-attr]  # those with points have one
            self._writer.add_scalar(name, value, self._step, walltime=record.time)
        if isinstance(record.event, _TOLD):
            self._writer.add_text("events", record.event.narrate(), self._step, walltime=record.time)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Sends a run to a project, by the account with which `wandb login` was called. A run that the project has already gets what
    it lacks."""

    def __init__(self, project: str) -> None:
        self._wandb = _package("wandb", "pip install wandb")
        self._project = project
        self._run: Any = None
        self._sent = 0

    def add(self, record: Record) -> None:
        if isinstance(record.event, ev.RunStarted):
            run = record.event.run
            config = {
                table: run[table] for table in ("model", "train") if table in run
            }  # the rest names machines and places
            self._run = self._wandb.init(
                project=self._project, name=run.get("name"), config=config, id=record.event.run_id, resume="allow"
            )
            self._run.define_metric("*", step_metric="step")  # W&B's own steps never go back, while a run's may
            self._sent = self._run.step  # its own steps count the calls of log, which are the same each time
        if self._run is None or not (found := points(record.event)):
            return
        if self._sent:
            self._sent -= 1
            return
        self._run.log({"step": record.event.step, **found})  # type: ignore[union-attr]

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def _package(name: str, install: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise ValueError(f"the package {name} is not installed; install it with: {install}") from None
