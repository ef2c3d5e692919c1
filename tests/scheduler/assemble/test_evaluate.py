"""From groups and cuts to a plan with its price."""

import numpy as np
from hypothesis import given, strategies as st

from dtfm.scheduler.assemble.evaluate import Evaluator, missing_links
from tests.scheduler.clusters import any_problem
from tests.scheduler.plans import memory_shortfall, random_draft

PROBLEMS = {"seed": st.integers(0, 10**6), "count": st.integers(1, 10), "layers": st.integers(1, 6)}


@given(**PROBLEMS)
def test_a_node_that_gets_nothing_might_as_well_be_idle(seed: int, count: int, layers: int) -> None:
    rng = np.random.default_rng(seed)
    problem = any_problem(rng, count, layers)
    evaluator = Evaluator(problem, keep_idle_hands=False)
    for _ in range(20):
        drawn = random_draft(rng, problem)
        found = evaluator.estimated(drawn.groups, drawn.cuts)
        if found.feasible:
            assert all(loads.all() for loads in found.draft.loads)
            again = evaluator.estimated(found.draft.groups, drawn.cuts)
            assert again.seconds == found.seconds
            assert [loads.tolist() for loads in again.draft.loads] == [loads.tolist() for loads in found.draft.loads]
            assert [flows.tolist() for flows in again.draft.flows] == [flows.tolist() for flows in found.draft.flows]


@given(**PROBLEMS, idle_hands=st.booleans())
def test_a_candidate_has_seconds_if_it_fits_memory_and_has_links(
    seed: int, count: int, layers: int, idle_hands: bool
) -> None:
    rng = np.random.default_rng(seed)
    problem = any_problem(rng, count, layers)
    drawn = random_draft(rng, problem)
    found = Evaluator(problem, keep_idle_hands=idle_hands).estimated(drawn.groups, drawn.cuts)
    assert (found.shortfall_bytes > 0) == (memory_shortfall(problem, drawn.groups, drawn.cuts) > 0)
    assert found.feasible == (found.shortfall_bytes == 0 and found.missing_links == 0)
    if found.feasible:
        assert missing_links(problem, found.draft) == 0
