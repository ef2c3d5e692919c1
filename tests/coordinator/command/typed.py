"""A command as somebody types it, in this process."""

from __future__ import annotations

import sys

import pytest

from dtfm.coordinator import cli


class Typed:
    """Runs commands of ``dtfm-coordinator``. ``err`` is what the last one said on standard error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.err = ""
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """The command ends with this exit code. Returns what it has printed, or its complaint."""
        self._monkeypatch.setattr(sys, "argv", ["dtfm-coordinator", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = self._capsys.readouterr()
        self.err = said.err
        assert (ended.value.code or 0) == code, said
        return said.err if code else said.out
