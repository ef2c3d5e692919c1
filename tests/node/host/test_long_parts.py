"""What takes long says what it is, and how long it took."""

from __future__ import annotations

import logging
import queue
import re

import pytest

from dtfm.node.host.long_parts import long_part


class Heard(logging.Handler):
    """Keeps what the log says, as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: queue.SimpleQueue[str] = queue.SimpleQueue()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.put(record.getMessage())


def test_a_long_part_is_named_while_it_goes_on_and_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dtfm")
    heard, log = Heard(), logging.getLogger("dtfm.node.host.long_parts")
    log.addHandler(heard)
    with long_part("reading the data", long_seconds=0.01):
        assert heard.messages.get(timeout=30) == "reading the data ..."
    log.removeHandler(heard)
    assert re.fullmatch(r"reading the data took \d+\.\d s", heard.messages.get(timeout=30))


def test_a_short_one_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dtfm")
    with long_part("reading the data", long_seconds=600):
        pass
    assert caplog.messages == []
