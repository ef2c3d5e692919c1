"""Faults as data: ``fail("b").at(step=5, phase=Phase.REDUCE).by(SIGKILL)``, given to a Cluster.

The process itself carries out its faults, in the thread that has just reached that phase, so they hit it exactly. This is the
one file of tests/cluster that reaches into the product's modules to do so; see "In the process that fails".
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import itertools
import json
import os
import random
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

from dtfm.coordinator.log.events import Event, NodeJoined, PlanAdopted, StepCommitted
from dtfm.coordinator.store.store import Record, Store
from dtfm.node.host.trace import Activity, Span, listen
from dtfm.node.state.state_store import Subscription, Tensor
from dtfm.node.training.trainer import Trainer
from dtfm.node.transport import sender
from dtfm.protos.control_pb2 import Commit
from dtfm.protos.frame import Header, frames

COORDINATOR = "coordinator"
HOUR = 3600.0


class Phase(enum.Enum):
    """When a fault happens: a moment of a step, of a change of plan, or of a snapshot."""

    FORWARD = "forward"
    """The first forward of the step begins."""
    BACKWARD = "backward"
    REDUCE = "reduce"
    """All gradients of a shard have arrived and are about to be added up."""
    VOTE = "vote"
    """The node has computed the step and has not voted. On the coordinator: all have voted, and the commit is not written."""
    COMMIT = "commit"
    """The commit is written, and the node has not received it; with RESET it never will. On the coordinator: the commit is
    written, and not announced."""
    APPLY = "apply"
    """The node has received the commit and is about to apply it."""
    ADOPT = "adopt"
    """The node begins to take its place in a new plan. On the coordinator: the plan is written, and not announced."""
    JOIN = "join"
    """On the coordinator alone: a node's joining is written, and the node does not know."""
    SNAPSHOT = "snapshot"
    """The node has written a file of a snapshot under a temporary name, and it is not on the disk for certain yet."""
    EVALUATE = "evaluate"
    """The node begins to evaluate, after the step."""


OF_A_STEP = (Phase.FORWARD, Phase.BACKWARD, Phase.REDUCE, Phase.VOTE, Phase.COMMIT, Phase.APPLY)
OF_THE_COORDINATOR = (Phase.VOTE, Phase.COMMIT, Phase.ADOPT, Phase.JOIN)


class Means(enum.Enum):
    """What happens then."""

    SIGKILL = "SIGKILL"
    PAUSE = "PAUSE"
    """SIGSTOP, and SIGCONT after the fault's seconds."""
    RESET = "RESET"
    """All of the process's TCP connections are reset, at both ends."""
    CORRUPT_FRAME = "CORRUPT_FRAME"
    """The next frame that the node sends is not in the protocol."""
    CLOCK_JUMP = "CLOCK_JUMP"
    """Python's wall clock is an hour ahead from then on. (The machine's own clock does not change.)"""
    SLOW = "SLOW"
    """From then on every forward takes longer, by the fault's seconds."""
    LAG = "LAG"
    """From then on the standbys of this node's state get each step later, by the fault's seconds."""
    HOLD = "HOLD"
    """No harm: the thread waits until the test calls Cluster.let_go, so that something else can happen first."""


SIGKILL = Means.SIGKILL
PAUSE = Means.PAUSE
RESET = Means.RESET
CORRUPT_FRAME = Means.CORRUPT_FRAME
CLOCK_JUMP = Means.CLOCK_JUMP
SLOW = Means.SLOW
LAG = Means.LAG
HOLD = Means.HOLD

_BEGINNINGS = {
    Activity.FORWARD: Phase.FORWARD,
    Activity.BACKWARD: Phase.BACKWARD,
    Activity.REDUCE: Phase.REDUCE,
    Activity.VOTE: Phase.VOTE,
    Activity.APPLY: Phase.APPLY,
    Activity.ADOPT: Phase.ADOPT,
    Activity.EVALUATE: Phase.EVALUATE,
}


@dataclass(frozen=True, slots=True)
class Fault:
    """``process``: a node, or COORDINATOR. ``step``: the fault happens when the process first reaches ``phase`` in this step
    or a later one, as it may have no part in this one. ``seconds``: how long a PAUSE lasts, or what SLOW or LAG add."""

    process: str
    step: int
    phase: Phase
    means: Means
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.process} at {self.phase.value} of step {self.step} by {self.means.value}"


@dataclass(frozen=True, slots=True)
class Moment:
    process: str
    step: int
    phase: Phase

    def by(self, means: Means, *, seconds: float = 0.0) -> Fault:
        lasting = means in (PAUSE, SLOW, LAG)
        assert (seconds > 0) == lasting, "PAUSE, SLOW and LAG need seconds; the other means take none"
        return Fault(self.process, self.step, self.phase, means, seconds)


@dataclass(frozen=True, slots=True)
class Victim:
    process: str

    def at(self, *, step: int, phase: Phase) -> Moment:
        assert self.process != COORDINATOR or phase in OF_THE_COORDINATOR, "the coordinator never comes to this phase"
        assert self.process == COORDINATOR or phase is not Phase.JOIN, "only the coordinator comes to this phase"
        return Moment(self.process, step, phase)


def fail(process: str) -> Victim:
    """The beginning of a sentence: ``fail("b").at(step=5, phase=Phase.VOTE).by(RESET)``."""
    return Victim(process)


def announcement(fault: Fault) -> str:
    """The line that the process writes to standard error just before."""
    return f"fault: {fault}\n"


def gate(fault: Fault) -> str:
    """The named pipe, in the process's folder, where a HOLD waits for a writer."""
    return f"hold-{fault.process}-{fault.step}"


def pair_of_faults(seed: int, nodes: Sequence[str], step: int, *, pause: float) -> tuple[Fault, Fault]:
    """Two of ``nodes`` fail in the same step. The seed decides the node, the phase and the means."""
    chance = random.Random(seed)
    first, second = (
        fail(node).at(step=step, phase=chance.choice(OF_A_STEP)).by(means, seconds=pause if means is PAUSE else 0.0)
        for node, means in zip(chance.sample(nodes, 2), chance.choices((SIGKILL, PAUSE, RESET), k=2), strict=True)
    )
    return first, second


def to_text(faults: Sequence[Fault]) -> str:
    """One line."""
    return json.dumps([{**asdict(f), "phase": f.phase.name, "means": f.means.name} for f in faults])


def from_text(text: str) -> tuple[Fault, ...]:
    """Inverse of ``to_text``."""
    return tuple(Fault(**{**f, "phase": Phase[f["phase"]], "means": Means[f["means"]]}) for f in json.loads(text))


# In the process that fails


class Pending:
    """The faults that this process has yet to carry out."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._lock = threading.Lock()
        self._faults = list(faults)

    def add(self, faults: Sequence[Fault]) -> None:
        with self._lock:
            self._faults += faults

    def reach(self, step: int, phase: Phase) -> Fault | None:
        """Called at ``phase`` of ``step``. Returns when the fault that belongs here, if any, has been carried out."""
        with self._lock:
            due = [f for f in self._faults if f.phase is phase and f.step <= step]
            fault = min(due, key=lambda f: f.step, default=None)
            if fault is None:
                return None
            self._faults.remove(fault)
        os.write(2, announcement(fault).encode())
        _MEANS[fault.means](fault)
        return fault


def install(faults: Sequence[Fault], orders: str) -> None:
    """From now on this process carries out ``faults``, and faults that come later through the named pipe ``orders``, one
    ``to_text`` a line."""
    pending = Pending(faults)

    def on_span(span: Span) -> None:
        if span.ended is None and span.activity in _BEGINNINGS:
            pending.reach(span.step, _BEGINNINGS[span.activity])

    def obey() -> None:
        with open(orders) as lines:
            for line in lines:
                pending.add(from_text(line))

    listen(on_span)
    _before_conclude(pending)
    _around_append(pending)
    _before_fsync(pending)
    threading.Thread(target=obey, daemon=True).start()


def _before_conclude(pending: Pending) -> None:
    conclude = Trainer.conclude

    def reaching(trainer: Trainer, commit: Commit) -> None:
        fault = pending.reach(commit.step, Phase.COMMIT)
        if fault is None or fault.means is not RESET:  # else the commit was on a connection that is gone
            conclude(trainer, commit)

    mock.patch.object(Trainer, "conclude", reaching).start()


_WRITTEN: dict[type[Event], Phase] = {
    StepCommitted: Phase.COMMIT,
    PlanAdopted: Phase.ADOPT,
    NodeJoined: Phase.JOIN,
}


def _around_append(pending: Pending) -> None:
    append = Store.append
    last = 0

    def reaching(store: Store, events: Sequence[Event]) -> list[Record]:
        nonlocal last
        for event in events:
            if isinstance(event, StepCommitted):
                last = event.step
                pending.reach(last, Phase.VOTE)
        records = append(store, events)
        for event in events:
            if type(event) in _WRITTEN:
                pending.reach(last, _WRITTEN[type(event)])
        return records

    mock.patch.object(Store, "append", reaching).start()


_SNAPSHOT_FILE = re.compile(r"/step-(\d+)(?:\.[\w-]+\.partial)?/bucket-\d+(?:-[0-9a-f]+)?\.safetensors")


def _before_fsync(pending: Pending) -> None:
    fsync = os.fsync

    def reaching(descriptor: int) -> None:
        with contextlib.suppress(OSError):
            if written := _SNAPSHOT_FILE.search(os.readlink(f"/proc/self/fd/{descriptor}")):
                pending.reach(int(written[1]), Phase.SNAPSHOT)
        fsync(descriptor)

    mock.patch.object(os, "fsync", reaching).start()


def _kill(_: Fault) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _pause(fault: Fault) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    # It inherits none of our streams, so that their readers see the end when we end.
    actions = [(os.POSIX_SPAWN_DUP2, null, stream) for stream in range(3)]
    wake = f"sleep {fault.seconds}; kill -CONT {os.getpid()}"
    waker = os.posix_spawn("/bin/sh", ["sh", "-c", wake], {}, file_actions=actions)
    os.close(null)
    os.kill(os.getpid(), signal.SIGSTOP)
    os.waitpid(waker, 0)


def _reset(_: Fault) -> None:
    """Connects each connected socket to nowhere (AF_UNSPEC), which makes TCP send RST and fails pending calls here."""
    libc = ctypes.CDLL(None, use_errno=True)
    nowhere = bytes(16)  # struct sockaddr whose family is AF_UNSPEC, 0
    for connection in _tcp_connections():
        with connection:
            if libc.connect(connection.fileno(), nowhere, len(nowhere)) != 0:
                raise OSError(ctypes.get_errno(), "a connection could not be reset")


def _tcp_connections() -> Iterator[socket.socket]:
    """This process's established connections, each through a new descriptor."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not os.readlink(entry).startswith("socket:"):
                continue
            found = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:
            continue  # closed meanwhile
        try:
            found.getpeername()
            tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
        except OSError:
            tcp = False  # a listening socket
        if tcp:
            yield found
        else:
            found.close()


def _corrupt_next_frame(_: Fault) -> None:
    sent = itertools.count()

    def corrupting(header: Header, encoded: memoryview) -> Iterator[bytes]:
        for frame in frames(header, encoded):
            damaged = bytearray(frame)
            if next(sent) == 0:
                damaged[0] ^= 0b100
            yield bytes(damaged)

    mock.patch.object(sender, "frames", corrupting).start()


def _advance_clock(_: Fault) -> None:
    real = time.time

    def ahead() -> float:
        return real() + HOUR

    mock.patch.object(time, "time", ahead).start()


def _slow_down(fault: Fault) -> None:
    def sleep_at_forward(span: Span) -> None:
        if span.ended is None and span.activity is Activity.FORWARD:
            time.sleep(fault.seconds)

    listen(sleep_at_forward)


def _lag(fault: Fault) -> None:
    def later(subscription: Subscription, tensors: Sequence[Tensor]) -> None:
        loop = subscription._loop
        loop.call_soon_threadsafe(loop.call_later, fault.seconds, subscription._put, tensors)

    mock.patch.object(Subscription, "put", later).start()


def _hold(fault: Fault) -> None:
    os.close(os.open(gate(fault), os.O_RDONLY))


_MEANS: dict[Means, Callable[[Fault], None]] = {
    SIGKILL: _kill,
    PAUSE: _pause,
    RESET: _reset,
    CORRUPT_FRAME: _corrupt_next_frame,
    CLOCK_JUMP: _advance_clock,
    SLOW: _slow_down,
    LAG: _lag,
    HOLD: _hold,
}

assert sys.platform.startswith("linux"), "faults are carried out with Linux's own calls"
