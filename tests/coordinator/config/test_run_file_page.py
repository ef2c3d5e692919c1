from __future__ import annotations

import tomllib
from pathlib import Path

from dtfm.protos.run_file.run_file import RunFile, parse_run
from dtfm.protos.run_file.table import table_of
from tests.coordinator.config.run_file_page import EXAMPLE, run_file_page

PAGE = Path(__file__).parents[3] / "docs" / "run-file.md"


def test_the_page_on_the_run_file_is_current() -> None:
    assert PAGE.read_text() == run_file_page(), "docs/run-file.md is out of date: run `make docs`"


def test_the_page_names_every_key() -> None:
    page = run_file_page()
    for name, field in RunFile.model_fields.items():
        for key in getattr(table_of(field), "model_fields", {name: field}):
            assert f"| `{key}` |" in page


def test_the_example_on_the_page_is_valid() -> None:
    run = parse_run(tomllib.loads(EXAMPLE), "the example")
    assert (run.train.steps, run.cluster.nodes) == (1000, 3)
