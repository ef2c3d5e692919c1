"""Compiled code on disk is not used when its source has changed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

IMPORT = "from dtfm.scheduler.model.compiled import compiled\n"
CALLEE = f"{IMPORT}@compiled\ndef number(): return"
CALLER = f"{IMPORT}from callee import number\n@compiled\ndef twice(): return 2 * number()"


def test_a_changed_file_counts_for_the_functions_of_other_files_that_call_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "caller.py").write_text(CALLER)
    for number in (1, 20, 300):
        (tmp_path / "callee.py").write_text(f"{CALLEE} {number}")
        for name in ("caller", "callee"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        assert importlib.import_module("caller").twice() == 2 * number
