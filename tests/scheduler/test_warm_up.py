"""After a warm-up nothing is left to compile: `scheduler/warm_up.py`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dtfm.scheduler.bound.branch_and_bound import Plans
from dtfm.scheduler.formats.paper import Network, paper_network, paper_workload
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.decision import Infeasible
from dtfm.scheduler.model.problem import Floats
from dtfm.scheduler.model.tables import Tables
from dtfm.scheduler.paper import plan_by_paper
from dtfm.scheduler.schedule import schedule
from dtfm.scheduler.search import exact
from dtfm.scheduler.warm_up import compiled_functions, is_compiled, warm_up
from tests.scheduler.clusters import even_workload, random_cluster, uniform_cluster

WORKLOAD = even_workload()
ANY_WAY = replace(WORKLOAD, checkpointing=None, optimizer_state=None, copy_bytes_per_parameter_byte=0.5)


def limited() -> Cluster:
    cluster = random_cluster(5, 12, unreachable=0.1)
    nodes = tuple(replace(node, up=1e8, down=2e8) for node in cluster.nodes)
    return replace(cluster, nodes=nodes)


def with_hosts(memory: float = 1e9) -> Cluster:
    cluster = random_cluster(5, 12)
    return replace(
        cluster, nodes=tuple(replace(node, memory_bytes=memory, host_memory_bytes=memory) for node in cluster.nodes)
    )


def explained(error: type[Exception], action: Callable[[], Any]) -> None:
    with pytest.raises(error):
        action()


def whole_numbers() -> Cluster:
    """A cluster with whole numbers, as nodes report their memory to a coordinator."""
    cluster = random_cluster(5, 12)
    nodes = tuple(replace(node, flops=int(node.flops), memory_bytes=int(node.memory_bytes)) for node in cluster.nodes)
    return replace(cluster, nodes=nodes)


def without_a_node() -> None:
    cluster = random_cluster(5, 12)
    plan = schedule(cluster, WORKLOAD, evaluations=100).plan
    left = [index for index, node in enumerate(cluster.nodes) if node.id != plan.stages[0].replicas[0]]
    grid = np.ix_(left, left)
    nodes = tuple(cluster.nodes[index] for index in left)
    schedule(Cluster(nodes, cluster.latency[grid], cluster.bandwidth[grid]), WORKLOAD, plan, time_used=lambda: 1.0)


QUESTIONS: dict[str, Callable[[], Any]] = {
    "any stages": lambda: schedule(random_cluster(5, 12), WORKLOAD, evaluations=300, threads=2),
    "any way to keep what nodes need": lambda: schedule(with_hosts(), ANY_WAY, evaluations=300),
    "no room": lambda: explained(Infeasible, lambda: schedule(with_hosts(1e6), ANY_WAY, evaluations=100)),
    "two stages": lambda: schedule(random_cluster(5, 12), WORKLOAD, stages=2, evaluations=300),
    "replicas per stage": lambda: schedule(random_cluster(5, 12), WORKLOAD, stages=(3, 3), evaluations=300),
    "connections and codecs": lambda: schedule(limited(), WORKLOAD, evaluations=300),
    "memory in whole bytes": lambda: schedule(whole_numbers(), WORKLOAD, evaluations=300),
    "few nodes": lambda: schedule(random_cluster(5, 4), WORKLOAD, evaluations=3000),
    "a node left": without_a_node,
    "the paper's objective": lambda: plan_by_paper(paper_network(Network.SPOT), paper_workload(), evaluations=300),
    "a large group": lambda: schedule(uniform_cluster(60), even_workload(12, 64), stages=1, time_used=lambda: 1.0),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_no_question_is_left_to_compile_for(question: str) -> None:
    warm_up()
    before = {function: list(function.signatures) for function in compiled_functions()}
    assert any(before.values())
    QUESTIONS[question]()
    assert {function: list(function.signatures) for function in compiled_functions()} == before


def test_the_small_cluster_is_searched_exactly_too(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []

    def priced(tables: Tables, plans: Plans, keep_idle_hands: bool) -> Floats:
        rows.append(len(plans.stages))
        return original(tables, plans, keep_idle_hands)

    original = exact.priced
    monkeypatch.setattr(exact, "priced", priced)
    warm_up.__wrapped__()
    assert len(rows) == 2, "from scratch, and with an incumbent"


def test_the_next_process_finds_everything_in_the_cache() -> None:
    warm_up()
    assert is_compiled()
    script = (
        "from dtfm.scheduler.warm_up import compiled_functions, is_compiled, warm_up\n"
        "assert is_compiled()\n"
        "warm_up()\n"
        "print(sum(sum(function.stats.cache_misses.values()) for function in compiled_functions()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert (done.stdout.strip(), done.stderr) == ("0", "")


def test_functions_missing_from_the_cache_have_to_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up()
    cache = compiled_functions()[0]._cache._cache_file
    monkeypatch.setattr(cache, "_source_stamp", b"a file that has changed")
    assert not is_compiled()
