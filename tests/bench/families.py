"""Loads a small model of each family, and compares two stages of it with transformers. Prints the table of docs/families.md.

Run: python -m tests.bench.families
"""

from __future__ import annotations

import math
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.node.model.causal.families import FAMILIES, Family, differences


def row(family: Family) -> str:
    """The family's line of the table."""
    with TemporaryDirectory() as folder:
        try:
            model = family.load(Path(folder))
        except ValueError as refusal:
            sentence = str(refusal).replace(folder, "FOLDER").replace("|", "\\|")
            return f"| {family} | refused | {sentence} |"
        loss, gradients = differences(family, model, Path(folder))
    return f"| {family} | taken | loss to {_bound(loss)}, gradients to {_bound(gradients)} |"


def _bound(difference: float) -> str:
    """The next power of ten, from 1e-8 on."""
    return f"1e{max(-8, math.ceil(math.log10(max(difference, 1e-12))))}"


def main() -> None:
    print("| model | | equal to transformers, or the sentence |\n|---|---|---|", flush=True)
    for family in FAMILIES:
        print(row(family), flush=True)


if __name__ == "__main__":
    main()
