"""What this node does, and when: spans, told to whoever listens. Process-wide, like logging, and silent unless somebody does.

`write_trace` writes them as a Chrome trace (open it at ui.perfetto.dev); several nodes' files can be opened together, as
their times are those of the wall clock.
"""

from __future__ import annotations

import enum
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType


class Activity(enum.Enum):
    """What a span may be of. On a GPU, FORWARD and BACKWARD end when it is done, REDUCE and APPLY when the work is queued."""

    ADOPT = "adopt"  # a plan: state, streams
    FETCH = "fetch"  # one bucket's state from donors
    FORWARD = "forward"
    BACKWARD = "backward"
    WAIT = "wait"  # for tensors of peers
    ENCODE = "encode"
    SEND = "send"
    RECEIVE = "receive"
    DECODE = "decode"
    REDUCE = "reduce"  # adding up one piece of a shard's gradients
    VOTE = "vote"
    APPLY = "apply"
    EVALUATE = "evaluate"


class Beside(enum.Enum):
    """What is kept in memory though this node could compute without: it may be, and within bounds of its own."""

    RETRY = "kept for another attempt at the step"  # progress.py
    EARLY = "gradients that came from replicas"  # inbox.py
    COPIES = "copies of others' state"  # following.py
    UPDATES = "state and steps on their way to followers"  # holding.py


@dataclass(frozen=True, slots=True)
class Span:
    """``began`` and ``ended`` in seconds of time.perf_counter; ``ended`` is None while it lasts. ``index``: which micro-batch
    or bucket, as in frame.Kind. ``track``: the thread, or the stream, that it belongs to; the spans of a track nest."""

    activity: Activity
    step: int
    index: int
    track: str
    began: float
    ended: float | None = None


#: Called at a span's beginning and at its end, in the thread where it happens.
Listener = Callable[[Span], None]

#: Called with what is kept of one kind, in bytes, whenever that changes, in the thread where it does.
Scale = Callable[[Beside, int], None]

_listeners: list[Listener] = []
_scales: list[Scale] = []
_beside: dict[Beside, dict[object, int]] = {kept: {} for kept in Beside}
_weighing = threading.Lock()
_NOTHING: AbstractContextManager[None] = nullcontext()


def listen(listener: Listener) -> None:
    """From now on ``listener`` hears of every span in this process."""
    _listeners.append(listener)


def forget(listener: Listener) -> None:
    _listeners.remove(listener)


def span(activity: Activity, step: int, index: int = 0, track: str = "") -> AbstractContextManager[None]:
    """``with span(Activity.FORWARD, step, number):`` around what it is of. ``track`` is the thread's name unless given."""
    return _Lasting(activity, step, index, track) if _listeners else _NOTHING


def tell(activity: Activity, step: int, index: int, track: str, began: float) -> None:
    """Of a span that is over, where a ``with`` block does not fit; ``began`` by time.perf_counter."""
    if _listeners:
        _notify(Span(activity, step, index, track, began, time.perf_counter()))


def tell_beside(kept: Beside, size: int, by: object = None) -> None:
    """``size`` bytes are kept now by one of those that keep such: ``by`` (hashable) says which, where there are several."""
    with _weighing:
        if size:
            _beside[kept][by] = size
        else:
            _beside[kept].pop(by, None)
        if _scales:
            total = sum(_beside[kept].values())
            for scale in tuple(_scales):
                scale(kept, total)


@contextmanager
def write_trace(path: Path, node: str) -> Iterator[None]:
    """Writes all spans of the block to ``path`` as they end, and what is kept as counters, as a Chrome trace of the process
    ``node``.

    The file can be read at any time, also when the process was killed: the format lets the closing bracket be missing.
    Raises ValueError when ``path`` cannot be written.
    """
    try:
        file = path.open("wb", buffering=0)  # whole events, should the process be killed
    except OSError as error:
        raise ValueError(
            f"the trace cannot be written to {path}: {error.strerror}; give --trace another file"
        ) from error
    lock = threading.Lock()
    tracks: dict[str, int] = {}
    process = json.dumps(node)
    wall = time.time() - time.perf_counter()

    # By hand: there are thousands of spans per second, and with json.dumps they took a tenth of a small model's step.
    def note(span: Span) -> None:
        if span.ended is None:
            return
        activity, began, took = span.activity.value, (wall + span.began) * 1e6, (span.ended - span.began) * 1e6
        with lock:
            named = ""
            if span.track not in tracks:
                tracks[span.track] = len(tracks)
                named = (
                    f',\n{{"ph":"M","name":"thread_name","pid":{process},"tid":{tracks[span.track]},'
                    f'"args":{{"name":{json.dumps(span.track)}}}}}'
                )
            event = (
                f'{named},\n{{"ph":"X","name":"{activity} {span.index}","cat":"{activity}","pid":{process},'
                f'"tid":{tracks[span.track]},"ts":{began:.1f},"dur":{took:.1f},'
                f'"args":{{"step":{span.step},"index":{span.index}}}}}'
            )
            file.write(event.encode())

    def weigh(kept: Beside, size: int) -> None:
        now = (wall + time.perf_counter()) * 1e6
        event = f',\n{{"ph":"C","name":"{kept.value}","pid":{process},"ts":{now:.1f},"args":{{"bytes":{size}}}}}'
        with lock:
            file.write(event.encode())

    with file:
        file.write(f'[{{"ph":"M","name":"process_name","pid":{process},"args":{{"name":{process}}}}}'.encode())
        listen(note)
        _scales.append(weigh)
        try:
            yield
        finally:
            forget(note)
            _scales.remove(weigh)
            with lock:
                file.write(b"\n]\n")


class _Lasting:
    """A span while it lasts."""

    __slots__ = ("_span",)

    def __init__(self, activity: Activity, step: int, index: int, track: str) -> None:
        self._span = Span(activity, step, index, track or threading.current_thread().name, time.perf_counter())

    def __enter__(self) -> None:
        _notify(self._span)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        span = self._span
        _notify(Span(span.activity, span.step, span.index, span.track, span.began, time.perf_counter()))


def _notify(span: Span) -> None:
    for listener in tuple(_listeners):
        listener(span)
