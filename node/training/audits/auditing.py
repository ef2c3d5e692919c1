"""A node's part in audits, between its vote and the commit: it hands out its tensors, and repeats others' work."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any, TypeVar

from dtfm.node.host.trace import Activity, span
from dtfm.node.host.work import WORK
from dtfm.node.network.dialling import Dialler
from dtfm.node.state.state_store import StateStore
from dtfm.node.training.audits.step_again import do_again, misfit
from dtfm.node.training.generation import Generation
from dtfm.node.transport.kept import Kept, Tensor, Wanted, Witnesses
from dtfm.node.transport.receiver import Closed
from dtfm.protos import PEER_FRACTION
from dtfm.protos.control_pb2 import Audit, Audited, NodeMessage

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class Auditing:
    """``begin`` and ``carry_out`` are for the training thread, ``call_off`` for that and the event loop."""

    def __init__(
        self, kept: Kept, store: StateStore, loop: asyncio.AbstractEventLoop, report: Callable[[NodeMessage], None]
    ) -> None:
        self._kept = kept
        self._store = store
        self._loop = loop
        self._report = report
        self._lock = threading.Lock()
        self._over = 0.0  # audits that had come by then (time.monotonic) are called off
        self._waiting: Future[Any] | None = None

    def begin(self, generation: Generation, step: int) -> None:
        """Before this node votes on ``step``."""
        if generation.commitments is not None:
            self._kept.offer = generation.offer(step)

    def call_off(self) -> None:
        """The step is committed or aborted, so that nobody waits for the audits that have come so far."""
        self._kept.offer = None
        with self._lock:
            self._over = time.monotonic()
            if self._waiting is not None:
                self._waiting.cancel()

    def carry_out(
        self, audit: Audit, came: float, generation: Generation | None, voted: int | None, dialler: Dialler
    ) -> None:
        """Repeats the work and reports the result, unless it does not fit what this node does, or is called off. ``came``: when
        the audit did (time.monotonic)."""
        if came <= self._over:
            return
        if (wrong := misfit(audit, generation, voted)) or generation is None:
            log.warning("MISFIT: an audit is not answered: %s", wrong)
            return
        lease = generation.run.lease_seconds
        seconds = audit.seconds or math.inf
        witnesses = Witnesses(generation.number, audit.step, generation.around, dialler, lease, seconds * PEER_FRACTION)

        def fetch(wanted: Sequence[Wanted]) -> Sequence[Tensor]:
            return self._await(witnesses.fetch(wanted), came)

        try:
            with span(Activity.AUDIT, audit.step):
                late = partial(self._is_late, came, seconds)
                answer = do_again(audit, generation, fetch, late, self._store.set_aside)
        except Closed as closed:
            log.info("an audit of %s is called off: %s", audit.node, closed)
            return
        except Exception as problem:  # whatever the device raises: this node's own work is done
            log.exception("step %d of %s could not be done again", audit.step, audit.node)
            answer = Audited(number=audit.number, problem=f"FAILED: {type(problem).__name__}: {problem}"[:1000])
            answer.activations = answer.gradients = answer.addends = answer.losses = -1
        finally:
            asyncio.run_coroutine_threadsafe(witnesses.close(), self._loop)
        self._report(NodeMessage(audited=answer))

    def _is_late(self, came: float, seconds: float) -> bool:
        """Raises Closed once an audit that ``came`` then is called off."""
        if came <= self._over:
            raise Closed("the step is over")
        return time.monotonic() > came + seconds

    def _await(self, work: Coroutine[Any, Any, Result], came: float) -> Result:
        with self._lock:
            if came <= self._over:
                work.close()
                raise Closed("the step is over")
            self._waiting = waiting = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            with WORK.waiting():
                return waiting.result()
        except CancelledError:
            raise Closed("the step is over") from None
        finally:
            with self._lock:
                self._waiting = None
