"""The output of benchmarks: one table for people, or one JSON object per row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Column, Table


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement. ``ratio``: the value over the value of ``against``, from the same run. None: it is compared with
    nothing."""

    measure: str
    value: float
    unit: str
    against: str = ""
    ratio: float | None = None


def show(title: str, rows: Sequence[Row], as_json: bool) -> None:
    if as_json:
        for row in rows:
            print(json.dumps(asdict(row)), flush=True)
        return
    value, ratio_column = Column("value", justify="right"), Column("ratio", justify="right")
    table = Table("measure", value, "unit", "against", ratio_column, title=title)
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        table.add_row(row.measure, f"{row.value:,.4g}", row.unit, row.against, ratio)
    Console().print(table)
