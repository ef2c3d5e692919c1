"""Curves for Weights & Biases, by its own library. The library sends them, or keeps them in wandb/ in its offline mode.

A point there has the number of the log's event. So the library itself knows which points it has, and refuses earlier ones.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from pathlib import Path

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its makers' reports would tell of this machine
import wandb  # it reads the environment once
from wandb.errors import AuthenticationError, UsageError
from wandb.sdk.lib.wbauth import authenticate_session

from dtfm.coordinator.track.tracker import TrackedRun, TrackerError
from dtfm.coordinator.track.wandb_file import last_point
from dtfm.coordinator.view.curves import Reading

SETTLE_SECONDS = 5.0
"""The longest wait for the end of a file that the library's process writes."""
LEAVE_SECONDS = 1.0
_KEY = (
    "set WANDB_API_KEY to the one at https://wandb.ai/authorize, or set WANDB_MODE=offline to keep the curves in wandb/ on this "
    "disk, for `wandb sync`"
)


def check(_place: str) -> None:
    """Raises TrackerError unless the library is offline, or has a key."""
    settings = wandb.setup().settings
    if settings.mode == "disabled":
        raise TrackerError("wandb keeps nothing, as WANDB_MODE is disabled; set it to online or offline")
    if _is_offline():
        return
    try:
        key = authenticate_session(host=settings.base_url, source="dtfm", prompt=False)
    except (AuthenticationError, UsageError, ValueError) as error:
        raise TrackerError(f"wandb has no key that it can use ({str(error).splitlines()[0]}); {_KEY}") from None
    if key is None:
        raise TrackerError(f"wandb has no key; {_KEY}")


class Writer:
    """The tracker's run has the id of ours. Later processes continue the run by this id."""

    def __init__(self, place: str, run: TrackedRun) -> None:
        check(place)  # without a key the library would ask for one at the terminal
        entity, _, project = place.rpartition("/")
        self._run = wandb.init(
            entity=entity or None,
            project=project,
            id=run.id,
            name=run.label,
            config=dict(run.settings),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(
                silent=True,
                console="off",  # printed lines have invitations
                disable_code=True,
                disable_git=True,
                disable_job_creation=True,
                save_code=False,
                host="",
                program="",
                x_disable_machine_info=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
                x_sync_dir_suffix=secrets.token_hex(3),  # otherwise runs of the same second share a folder
            ),
        )
        self._written = 0  # the last point's number
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.has = _points_on_disk(run.id) if _is_offline() else max(0, self._run.step - 1)

    def write(self, sequence: int, figures: Reading) -> None:
        self._run.log({"step": figures.step, **figures.values, "_timestamp": figures.time}, step=sequence)
        self.has = self._written = sequence

    def back_to(self, time: float, step: int) -> None:
        """Keeps the points of later steps: the curves go back to the step, and on from it."""

    def flush(self) -> None:
        """Does nothing: the library's own process writes and sends."""

    def close(self) -> None:
        """Ends the run. Offline, the library's process may still be writing when ``finish`` returns; the next reader must find
        all points."""
        self._run.finish()
        file, until = Path(self._run.settings.sync_file), time.monotonic() + SETTLE_SECONDS
        while _is_offline() and last_point(file) < self._written and time.monotonic() < until:
            time.sleep(SETTLE_SECONDS / 100)


def leave() -> None:
    """Lets the library's own process go on by itself. Otherwise the end of this process would wait for it, perhaps long if it
    cannot reach a server."""
    leaving = threading.Thread(target=wandb.teardown, daemon=True)
    leaving.start()
    leaving.join(LEAVE_SECONDS)


def _is_offline() -> bool:
    return wandb.setup().settings.mode in ("offline", "dryrun")


def _points_on_disk(id: str) -> int:
    """The number of the last point that earlier processes have kept."""
    folder = Path(wandb.setup().settings.wandb_dir)
    return max(map(last_point, folder.glob(f"offline-run-*-{id}*/run-{id}.wandb")), default=0)
