"""What this node does, and when: spans, passed to listeners. Process-wide, like logging, and nearly free without listeners.

`write_trace` writes them as a Chrome trace, for ui.perfetto.dev. Times are wall-clock times, so that the files of several nodes
can be opened together.
"""

from __future__ import annotations

import enum
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path


class Activity(enum.Enum):
    """What a span measures. On a GPU, FORWARD, BACKWARD, REDUCE and APPLY end when the work is queued."""

    ADOPT = "adopt"  # setting up a plan: state and streams
    FETCH = "fetch"  # one bucket's state from donors
    FORWARD = "forward"
    BACKWARD = "backward"
    WAIT = "wait"  # for tensors from peers
    ENCODE = "encode"
    SEND = "send"
    RECEIVE = "receive"
    DECODE = "decode"
    REDUCE = "reduce"  # adding up one piece of a shard's gradients
    VOTE = "vote"
    AUDIT = "audit"  # doing another replica's work again
    APPLY = "apply"
    EVALUATE = "evaluate"


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time of one activity."""

    activity: Activity
    step: int
    index: int
    """The micro-batch or bucket, as in frame.Kind."""
    track: str
    """The thread or stream of the span. The spans of a track nest."""
    began: float
    """In seconds of time.perf_counter."""
    ended: float | None = None
    """In seconds of time.perf_counter; None at the span's beginning."""


#: Called at a span's beginning and at its end, in its thread.
Listener = Callable[[Span], None]

_listeners: list[Listener] = []
_NOTHING: AbstractContextManager[None] = nullcontext()


def listen(listener: Listener) -> None:
    """Calls ``listener`` for every span of this process from now on."""
    _listeners.append(listener)


def forget(listener: Listener) -> None:
    _listeners.remove(listener)


def span(activity: Activity, step: int, index: int = 0, track: str = "") -> AbstractContextManager[None]:
    """A context that is a span. ``track`` is the thread's name by default."""
    if not _listeners:
        return _NOTHING
    return _told(Span(activity, step, index, track or threading.current_thread().name, time.perf_counter()))


def note_span(activity: Activity, step: int, index: int, track: str, began: float) -> None:
    """Records a span that ends now, where a ``with`` block does not fit; ``began`` by time.perf_counter."""
    if _listeners:
        _notify(Span(activity, step, index, track, began, time.perf_counter()))


@contextmanager
def write_trace(path: Path, node: str) -> Iterator[None]:
    """Writes the spans of the block to ``path`` as they end, as a Chrome trace of process ``node``.

    The file can be read at any time, also if the process was killed: the format allows a missing closing bracket. Raises
    ValueError if ``path`` cannot be written.
    """
    try:
        file = path.open("wb", buffering=0)  # whole events, even if the process is killed
    except OSError as error:
        raise ValueError(
            f"the trace cannot be written to {path}: {error.strerror}; give --trace another file"
        ) from error
    lock = threading.Lock()
    tracks: dict[str, int] = {}
    process = json.dumps(node)
    wall = time.time() - time.perf_counter()

    # Not json.dumps: there are thousands of spans per second, and it took a tenth of a small model's step.
    def write_span(span: Span) -> None:
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

    with file:
        file.write(f'[{{"ph":"M","name":"process_name","pid":{process},"args":{{"name":{process}}}}}'.encode())
        listen(write_span)
        try:
            yield
        finally:
            forget(write_span)
            with lock:
                file.write(b"\n]\n")


@contextmanager
def _told(begun: Span) -> Iterator[None]:
    _notify(begun)
    try:
        yield
    finally:
        _notify(replace(begun, ended=time.perf_counter()))


def _notify(span: Span) -> None:
    for listener in tuple(_listeners):
        listener(span)
