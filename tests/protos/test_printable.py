"""Text of others on a terminal and in logs: `protos/printable.py`."""

from __future__ import annotations

import json
import logging
import sys

import pytest
from hypothesis import given, strategies as st

from dtfm.node.command.options import log_to_stderr, mistakes
from dtfm.protos.printable import JsonFormatter, PrintableFormatter, printable

EVIL = "\x1b]0;hacked\x07\x1b[2J\r\u202e\x9b31m"


@given(st.text())
def test_nothing_but_printable_characters_is_left_and_these_stay(text: str) -> None:
    shown = printable(text, "?")
    assert shown.isprintable()
    assert len(shown) == len(text)
    assert all(new == old for new, old in zip(shown, text, strict=True) if old.isprintable())


def test_no_peer_writes_a_line_of_the_log_or_to_the_terminal() -> None:
    said = f"lost: UNKNOWN: {EVIL}\n12:00:00 node b has confessed"
    record = logging.LogRecord("dtfm", logging.WARNING, "", 0, "peer a is %s", (said,), None)
    lines = PrintableFormatter("12:00:01 %(message)s").format(record).split("\n")
    assert all(line.isprintable() for line in lines)
    assert [line.startswith("12:") for line in lines] == [True, False]


def test_a_traceback_keeps_its_lines() -> None:
    try:
        raise ValueError(EVIL)
    except ValueError:
        record = logging.LogRecord("dtfm", logging.ERROR, "", 0, "it failed", (), sys.exc_info())
    lines = PrintableFormatter("%(message)s").format(record).split("\n")
    assert len(lines) >= 4
    assert all(line.isprintable() for line in lines)


def test_a_nodes_log_and_its_last_word_are_printable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.Logger("root")
    monkeypatch.setattr(logging, "root", root)
    log_to_stderr(verbose=False, json=False)
    root.warning("peer a: %s", EVIL)
    with pytest.raises(BaseException, match="2"), mistakes():
        raise ValueError(f"the coordinator says {EVIL}\nand more")
    shown = capsys.readouterr().err
    assert shown.count("hacked") == 2
    assert all(line.isprintable() for line in shown.split("\n"))


def test_as_json_a_record_is_one_line_and_says_of_which_run_node_generation_and_step_it_is() -> None:
    place = {"run": "r", "node": "n", "generation": 3, "step": 7}
    record = logging.LogRecord("dtfm", logging.WARNING, "", 0, "peer a: %s", (f"{EVIL}\nand more",), None)
    assert set(json.loads(JsonFormatter().format(record))) == {"time", "level", "message"}, "as before it is let in"
    record.place = place
    text = JsonFormatter().format(record)
    assert text.isprintable()
    told = json.loads(text)
    assert {key: told[key] for key in place} == place
    assert (told["time"], told["level"]) == (record.created, "warning")
    assert told["message"] == f"peer a: {printable(EVIL)}\n    and more"
