"""Has the scheduler compiled before the first plan is wanted."""

from __future__ import annotations

import asyncio
import logging
import time

from dtfm.compiled_code import compile_apart
from dtfm.scheduler.warm_up import is_compiled, warm_up

log = logging.getLogger(__name__)

WORTH_A_WORD = 2.0
"""Seconds after which a message says what is taking the time."""
_NICENESS = 10
"""So much more than other processes does the compiler give way: nodes may be training on this machine."""


async def compile_scheduler() -> None:
    """Returns when nothing is left to compile: after half a second, or after a minute on a machine's first start."""
    began = time.monotonic()
    if not await asyncio.to_thread(is_compiled):
        await compile_apart("dtfm.scheduler.warm_up", _NICENESS)
    try:
        await asyncio.to_thread(warm_up)
    except Exception:
        log.exception("the scheduler could not be compiled")  # the first question to the planner fails in the same way
        return
    took = time.monotonic() - began
    if took > WORTH_A_WORD:
        log.info("Compiled the scheduler in %.0f s; this is kept for the next start.", took)
