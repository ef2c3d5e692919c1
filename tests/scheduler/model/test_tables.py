"""The arrays that compiled functions take: `model/tables.py`."""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.model.problem import Problem
from dtfm.scheduler.model.tables import tables
from dtfm.scheduler.model.workload import Layer, Workload
from tests.scheduler.clusters import uniform_cluster


def test_whole_numbers_make_the_same_types_as_fractions() -> None:
    """Others would compile everything again, for a minute, while somebody waits for a plan."""
    whole = Workload((Layer("a", 10, 10, 10, 20, 5), Layer("b", 10, 10, 10, 20, 5)), 4)
    parts = Workload((Layer("a", 0.5, 0.5, 0.5, 0.5, 0.5), Layer("b", 0.5, 0.5, 0.5, 0.5, 0.5)), 4)
    made, usual = (tables(Problem(uniform_cluster(2), workload)) for workload in (whole, parts))
    for field, array, same in zip(made._fields, made, usual, strict=True):
        assert np.asarray(array).dtype == np.asarray(same).dtype, field
