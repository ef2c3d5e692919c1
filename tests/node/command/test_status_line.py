"""The line that a node shows while it takes part."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import pty
import struct
import sys
import termios

import pytest

from dtfm.node.command import status_line as module
from dtfm.node.command.options import ToStderr
from dtfm.node.command.status_line import status_line


async def test_without_a_terminal_a_line_comes_now_and_then_and_once_more_at_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(module, "EVERY_SECONDS", 0)
    lines = iter(["", "one", "one", "two"])
    shown, last = asyncio.Event(), "the end"

    def line() -> str:
        if (following := next(lines, None)) is None:
            shown.set()
        return following if following is not None else last

    async with status_line(line):
        await asyncio.wait_for(shown.wait(), 10)
    assert caplog.messages == ["one", "two", "the end"]


async def test_on_a_terminal_it_is_rewritten_in_its_place_below_what_else_is_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inside, outside = pty.openpty()
    fcntl.ioctl(outside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))
    monkeypatch.setattr(module, "REFRESH_SECONDS", 0)
    monkeypatch.setenv("TERM", "xterm")
    numbers, shown = iter(range(10**9)), asyncio.Event()

    def line() -> str:
        if (number := next(numbers)) == 3:
            shown.set()
        return f"step {number}"

    with os.fdopen(outside, "w") as terminal, monkeypatch.context() as patched:
        handler = ToStderr()
        logging.getLogger().addHandler(handler)
        patched.setattr(sys, "stdout", terminal)
        patched.setattr(sys, "stderr", terminal)
        async with status_line(line):
            await asyncio.wait_for(shown.wait(), 10)
            logging.getLogger().warning("something happened")
        logging.getLogger().removeHandler(handler)
        written = ""
        while "\x1b[?25h" not in written:  # the cursor is back
            written += os.read(inside, 1 << 16).decode()
    os.close(inside)
    before, _, after = written.partition("something happened\r\n")
    assert "step 0" in before
    assert before.endswith("\x1b[2K"), "the line is erased first"
    assert before.count("\n") == 0, "all in one line, which what happened takes over"
    assert after.endswith("\r\n\x1b[?25h")
    assert after.count("\n") == 1
