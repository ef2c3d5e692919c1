"""Families of transformers: each is taken, and then computes what transformers computes, or it is refused with a reason.

`python -m tests.bench.families` prints the table of docs/families.md.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.node.model.causal.families import FAMILIES, Family, differences

TAKEN = [each for each in FAMILIES if not each.refusal]
REFUSED = [each for each in FAMILIES if each.refusal]


@pytest.mark.soak
@pytest.mark.parametrize("family", TAKEN, ids=str)
def test_what_is_taken_computes_as_transformers_does(family: Family, tmp_path: Path) -> None:
    loss, gradients = differences(family, family.load(tmp_path), tmp_path)
    assert loss < 1e-5
    assert gradients < 1e-4


@pytest.mark.soak
@pytest.mark.parametrize("family", REFUSED, ids=str)
def test_what_is_refused_says_why(family: Family, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^(model|data)\\..*{re.escape(family.refusal)}"):
        family.load(tmp_path)


def test_the_page_names_them_all() -> None:
    page = (Path(__file__).parents[4] / "docs/families.md").read_text()
    for family in FAMILIES:
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {family} |")]
        assert row.split(" | ")[1].startswith("refused" if family.refusal else "taken")
