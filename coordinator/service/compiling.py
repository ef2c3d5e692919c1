"""Has the scheduler compiled before the first plan is wanted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time

from dtfm.scheduler.warm_up import is_compiled, warm_up

log = logging.getLogger(__name__)

WORTH_A_WORD = 2.0
"""Seconds after which a message says what is taking the time."""
_NICENESS = 10
"""So much more than other processes does the compiler give way: nodes may be training on this machine."""


async def compile_scheduler() -> None:
    """Returns when nothing is left to compile: after half a second, or after a minute on a machine's first start.

    Compiling holds Python's interpreter for a third of a second at a time, during which no heartbeat is heard. So a process
    of its own does it, and this one only loads the result. That process ends when this is cancelled.
    """
    began = time.monotonic()
    if not await asyncio.to_thread(is_compiled):
        await _fill_cache()
    try:
        await asyncio.to_thread(warm_up)
    except Exception:
        log.exception("the scheduler could not be compiled")  # the first question to the planner fails in the same way
        return
    took = time.monotonic() - began
    if took > WORTH_A_WORD:
        log.info("Compiled the scheduler in %.0f s; this is kept for the next start.", took)


async def _fill_cache() -> None:
    """Where this fails, `warm_up` compiles."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dtfm.scheduler.warm_up"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in a terminal ends the coordinator in order, and that ends this process
    )
    try:
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, process.pid, _NICENESS)
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
