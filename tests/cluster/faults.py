"""Faults as data: ``fail("b").at(step=5, phase=Phase.REDUCE).by(SIGKILL)``, given to a Cluster before it starts "b".

The process itself carries its faults out, in the thread that has just come to that phase, so they hit it exactly.
"""

from __future__ import annotations

import ctypes
import enum
import itertools
import json
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.store import Record, Store
from dtfm.node.host.trace import Activity, Span, listen
from dtfm.node.state.state_store import Subscription, Tensor
from dtfm.node.training.trainer import Trainer
from dtfm.node.transport import sender
from dtfm.protos.control_pb2 import Commit
from dtfm.protos.frame import HEADER_BYTES, Header, frames

COORDINATOR = "coordinator"
HOUR = 3600.0


class Phase(enum.Enum):
    """Where in a step."""

    FORWARD = "forward"
    """The first forward of the step begins."""
    BACKWARD = "backward"
    REDUCE = "reduce"
    """All gradients of a shard are here and are about to be added up."""
    VOTE = "vote"
    """Computed, not voted. On the coordinator: all have voted, the commit is not written."""
    COMMIT = "commit"
    """The commit is written, and this node has not heard of it: with RESET it never will. On the coordinator: it is written,
    and not announced."""
    APPLY = "apply"
    """The node has heard of the commit and is about to apply it."""


class Means(enum.Enum):
    """What happens there."""

    SIGKILL = "SIGKILL"
    PAUSE = "PAUSE"
    """SIGSTOP, and SIGCONT after the fault's seconds."""
    RESET = "RESET"
    """All of the process's TCP connections are reset, at both ends."""
    CORRUPT_FRAME = "CORRUPT_FRAME"
    """A bit of the next frame that the node sends is flipped, after its checksum was taken."""
    CLOCK_JUMP = "CLOCK_JUMP"
    """Python's wall clock is an hour ahead from then on. (The machine's own is everybody's, and stays.)"""
    SLOW = "SLOW"
    """Every forward takes the fault's seconds longer from then on."""
    LAG = "LAG"
    """Steps go to whoever follows this node's state the fault's seconds later from then on."""
    HOLD = "HOLD"
    """No harm: the thread stays there until the test lets go (Cluster.let_go), so that something else happens first."""


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
}


@dataclass(frozen=True, slots=True)
class Fault:
    """``process``: a node, or COORDINATOR. ``step``: or the first one after it in which the process comes to ``phase``; it may
    have no part in this one. ``seconds``: how long a PAUSE lasts, or how much longer SLOW or LAG take."""

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
        assert (seconds > 0) == lasting, "a pause, slowness and a lag take some seconds, nothing else does"
        return Fault(self.process, self.step, self.phase, means, seconds)


@dataclass(frozen=True, slots=True)
class Victim:
    process: str

    def at(self, *, step: int, phase: Phase) -> Moment:
        assert self.process != COORDINATOR or phase in (Phase.VOTE, Phase.COMMIT), "the coordinator computes nothing"
        return Moment(self.process, step, phase)


def fail(process: str) -> Victim:
    """The beginning of a sentence: ``fail("b").at(step=5, phase=Phase.VOTE).by(RESET)``."""
    return Victim(process)


def announcement(fault: Fault) -> str:
    """The line that the process writes to standard error just before."""
    return f"fault: {fault}\n"


def gate(fault: Fault) -> str:
    """The named pipe, in the process's folder, at which a HOLD waits for a writer."""
    return f"hold-{fault.process}-{fault.step}"


def pair_of_faults(seed: int, nodes: Sequence[str], step: int, *, pause: float) -> tuple[Fault, Fault]:
    """Two of ``nodes`` fail in the same step, each somewhere and somehow: the same for the same ``seed``."""
    chance = random.Random(seed)
    first, second = (
        fail(node).at(step=step, phase=chance.choice(list(Phase))).by(means, seconds=pause if means is PAUSE else 0.0)
        for node, means in zip(chance.sample(nodes, 2), chance.choices((SIGKILL, PAUSE, RESET), k=2), strict=True)
    )
    return first, second


def to_text(faults: Sequence[Fault]) -> str:
    return json.dumps([{**asdict(f), "phase": f.phase.name, "means": f.means.name} for f in faults])


def from_text(text: str) -> tuple[Fault, ...]:
    """Inverse of ``to_text``."""
    return tuple(Fault(**{**f, "phase": Phase[f["phase"]], "means": Means[f["means"]]}) for f in json.loads(text))


# In the process that fails


def install(faults: Sequence[Fault]) -> None:
    """From now on this process carries ``faults`` out."""
    pending = sorted(faults, key=lambda fault: fault.step)

    def reach(step: int, phase: Phase) -> Fault | None:
        """Here is ``phase`` of ``step``: what was to happen has happened when this returns."""
        fault = next((f for f in pending if f.phase is phase and f.step <= step), None)
        if fault is not None:
            pending.remove(fault)
            os.write(2, announcement(fault).encode())
            _MEANS[fault.means](fault)
        return fault

    def on_span(span: Span) -> None:
        if span.ended is None and span.activity in _BEGINNINGS:
            reach(span.step, _BEGINNINGS[span.activity])

    listen(on_span)
    _before_conclude(reach)
    _around_append(reach)


def _before_conclude(reach: Callable[[int, Phase], Fault | None]) -> None:
    conclude = Trainer.conclude

    def reaching(trainer: Trainer, commit: Commit) -> None:
        fault = reach(commit.step, Phase.COMMIT)
        if fault is None or fault.means is not RESET:  # else it was on a connection that is no more
            conclude(trainer, commit)

    mock.patch.object(Trainer, "conclude", reaching).start()


def _around_append(reach: Callable[[int, Phase], Fault | None]) -> None:
    append = Store.append

    def reaching(store: Store, events: Sequence[ev.Event]) -> list[Record]:
        committed = [event.step for event in events if isinstance(event, ev.StepCommitted)]
        for step in committed:
            reach(step, Phase.VOTE)
        records = append(store, events)
        for step in committed:
            reach(step, Phase.COMMIT)
        return records

    mock.patch.object(Store, "append", reaching).start()


def _kill(_: Fault) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _pause(fault: Fault) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    # With nothing of ours open: whoever reads our output shall not wait for this.
    actions = [(os.POSIX_SPAWN_DUP2, null, stream) for stream in range(3)]
    wake = f"sleep {fault.seconds}; kill -CONT {os.getpid()}"
    waker = os.posix_spawn("/bin/sh", ["sh", "-c", wake], {}, file_actions=actions)
    os.close(null)
    os.kill(os.getpid(), signal.SIGSTOP)
    os.waitpid(waker, 0)


def _reset(_: Fault) -> None:
    """TCP's own way: connecting a connected socket to nowhere (AF_UNSPEC) sends RST and fails what is under way here."""
    libc = ctypes.CDLL(None, use_errno=True)
    nowhere = bytes(16)  # struct sockaddr whose family is AF_UNSPEC, 0
    for connection in _tcp_connections():
        with connection:
            if libc.connect(connection.fileno(), nowhere, len(nowhere)) != 0:
                raise OSError(ctypes.get_errno(), "a connection could not be reset")


def _tcp_connections() -> Iterator[socket.socket]:
    """This process's established ones, through descriptors of their own."""
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
            tcp = False  # it listens
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
                damaged[HEADER_BYTES] ^= 0b100
            yield bytes(damaged)

    mock.patch.object(sender, "frames", corrupting).start()


def _advance_clock(_: Fault) -> None:
    told = time.time

    def ahead() -> float:
        return told() + HOUR

    mock.patch.object(time, "time", ahead).start()


def _slow_down(fault: Fault) -> None:
    def dawdle(span: Span) -> None:
        if span.ended is None and span.activity is Activity.FORWARD:
            time.sleep(fault.seconds)

    listen(dawdle)


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

assert sys.platform.startswith("linux"), "faults are carried out by means of Linux"
