"""From groups and cuts to a plan with its price."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dtfm.scheduler.assemble.evaluate import Evaluator, memory_shortfall, missing_links, price_of
from dtfm.scheduler.model.sketch import empty_sketch, position_of
from tests.scheduler.clusters import any_problem
from tests.scheduler.plans import random_draft

PROBLEMS = {"seed": st.integers(0, 10**6), "count": st.integers(1, 10), "layers": st.integers(1, 6)}


@settings(max_examples=150, deadline=None)
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


@settings(max_examples=150, deadline=None)
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


@settings(max_examples=100, deadline=None)
@given(**PROBLEMS, part=st.floats(0.1, 2.0), evenness=st.sampled_from([0.0, 0.3]))
def test_a_price_below_the_limit_does_not_depend_on_it(
    seed: int, count: int, layers: int, part: float, evenness: float
) -> None:
    """Evenness counts twice as much as the mean busy time of the stages, which the levels of a whole estimate exceed."""
    rng = np.random.default_rng(seed)
    problem = any_problem(rng, count, layers)
    evaluator, sketch = Evaluator(problem, keep_idle_hands=False), empty_sketch(count)
    drawn = random_draft(rng, problem)
    position = position_of(drawn.groups, drawn.cuts, count)
    whole = price_of(evaluator.tables, position, sketch, False, np.inf, 0.0)
    even = whole + evenness * float(sketch.levels.sum())
    limited = price_of(evaluator.tables, position, sketch, False, part * whole, evenness)
    if even <= part * whole:
        assert limited == whole
    elif limited != whole:
        assert limited > part * whole
