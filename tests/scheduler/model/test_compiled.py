"""Compiled code on disk is not used when its source has changed, and says who may call it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

from dtfm.scheduler.model.compiled import compiled, entry
from dtfm.scheduler.model.problem import Floats

IMPORT = "from __future__ import annotations\nfrom dtfm.scheduler.model.compiled import compiled, entry\n"
CALLEE = f"{IMPORT}@compiled()\ndef number() -> int: return"
CALLER = f"{IMPORT}from callee import number\n@entry()\ndef twice() -> int: return 2 * number()"


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


@compiled()
def half(number: float) -> float:
    return number / 2


@entry(makes_arrays=True)
def row(number: float) -> Floats:
    return np.full(3, half(number))


def test_python_calls_only_entries() -> None:
    assert row(4.0).tolist() == [2.0] * 3
    with pytest.raises(TypeError, match="only compiled functions call half"):
        half(4.0)


def test_a_function_that_gets_arrays_has_to_say_so() -> None:
    def first(number: float) -> float:
        return float(row(number)[0])

    with pytest.raises(AssertionError, match="first"):
        compiled()(first)
