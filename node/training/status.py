"""The view of the person who lends this device: the state of the run, this node's share, and the reason if the run waits."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta

from dtfm.protos.control_pb2 import Commit, RunStatus, Standby, Welcome
from dtfm.protos.printable import counted
from dtfm.scheduler.model.plan import Plan

RECENT_STEPS = 20
"""The number of steps over which speed is averaged."""


class Status:
    """Takes the coordinator's messages; ``line`` makes one line of them. ``without_share``: this node's role while it has no
    part in the plan."""

    def __init__(self, node: str, without_share: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._node = node
        self._without_share = without_share
        self._clock = clock
        self._name = ""  # the run's
        self.run = RunStatus()
        self._heard = 0.0  # the time of the last commit, by the clock
        self._speeds: deque[tuple[int, float]] = deque(maxlen=RECENT_STEPS)  # tokens and seconds, of whole steps
        self._generation = -1  # generation of the plan with this `_share`; -1: none yet
        self._share = ""
        self._load = 0  # the number of micro-batches of this node in each step
        self._copy = ""  # the layers that it keeps as a standby
        self._idle = ""  # why the plan leaves this node out
        self._micro_batches = 0  # computed by this process, of committed steps
        self._worked = 0  # committed steps with a part of this node, in all of its processes

    def welcomed(self, welcome: Welcome) -> None:
        self._name, self._worked = welcome.run.name, welcome.worked_steps
        self.told(welcome.status)

    def told(self, run: RunStatus) -> None:
        if run.step != self.run.step:
            self._heard = self._clock()
            if run.seconds > 0:
                self._speeds.append((run.tokens, run.seconds))
        self.run = run
        if run.HasField("idle"):
            self._idle = run.idle

    def committed(self, commit: Commit) -> None:
        if commit.generation == self._generation:
            self._worked += commit.step > self.run.step  # else the welcome has counted it
            self._micro_batches += self._load
        self.told(commit.status)

    def assigned(self, plan: Plan) -> None:
        for stage in plan.stages:
            if self._node in stage.replicas:
                self._load = stage.loads[stage.replicas.index(self._node)]
                layers = f"layers {stage.layers[0]}-{stage.layers[1] - 1} of {plan.stages[-1].layers[1]}"
                self._share = f"{self._load} of {sum(stage.loads)} micro-batches, {layers}"
                self._generation, self._copy = plan.generation, ""

    def stands_by(self, standby: Standby) -> None:
        first, past_last = standby.first_layer, standby.past_last_layer
        self._copy = f"copies layers {first}-{past_last - 1}, to step in at once" if past_last else ""

    def line(self, problem: str = "") -> str:
        """The line, without its end; empty before anything is known. ``problem``: why this node has no part in the run."""
        run = self.run
        if not run.steps:
            return ""
        parts = [f"step {run.step:,} of {run.steps:,}"]
        if run.HasField("loss"):
            parts.append(f"loss {run.loss:.4f}")
        if waiting := problem or run.waiting:
            parts.append(f"waiting: {waiting}")
        elif self._speeds:
            tokens, seconds = (sum(column) for column in zip(*self._speeds, strict=True))
            left = (run.steps - run.step) * seconds / len(self._speeds) - (self._clock() - self._heard)
            parts += [f"{tokens / seconds:,.0f} tokens/s", f"{timedelta(seconds=round(max(left, 0)))} left"]
        takes_part = run.generation == self._generation
        share = self._share if takes_part else self._copy or self._without_share
        if self._idle and not takes_part:
            share = f"{share} ({self._idle})"
        return f"{', '.join(parts)} | this node: {share}; {self._done}"

    def place(self) -> dict[str, str | int]:
        """Of which run, node, generation and step something that is logged now is."""
        return {"run": self._name, "node": self._node, "generation": self.run.generation, "step": self.run.step}

    def last_line(self) -> str:
        """What is left to say once this node ends."""
        return f"This node took part: {self._done}" if self._worked else ""

    @property
    def _done(self) -> str:
        micro_batches = counted(self._micro_batches, "micro-batch", "es")
        return f"{counted(self._worked, 'step')} done ({micro_batches} since it started)"
