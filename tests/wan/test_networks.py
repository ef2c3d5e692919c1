"""The paper's five networks at eight nodes."""

from __future__ import annotations

import numpy as np
import pytest

from dtfm.scheduler.formats.network import parse_network
from dtfm.scheduler.formats.paper import Network, paper_network
from tests.scheduler.dumps import dump_network
from tests.wan.networks import TOTAL_BANDWIDTH, eight_nodes
from tests.wan.wan import Wan


@pytest.mark.parametrize("network", Network)
def test_latencies_are_those_of_the_paper_and_one_number_divides_all_bandwidths(network: Network) -> None:
    scaled, whole = eight_nodes(network), paper_network(network)
    regions = [node.region for node in whole.nodes]
    for i, a in enumerate(scaled.cluster.nodes):
        for j, b in enumerate(scaled.cluster.nodes):
            if i == j:
                continue
            first = regions.index(a.region)
            second = regions.index(b.region) if a.region != b.region else first + 1
            assert scaled.cluster.latency[i, j] == whole.latency[first, second]
            assert scaled.cluster.bandwidth[i, j] * scaled.divisor == pytest.approx(whole.bandwidth[first, second])


@pytest.mark.parametrize("network", Network)
def test_all_links_together_have_the_bandwidth_that_a_small_machine_emulates(network: Network) -> None:
    cluster = eight_nodes(network).cluster
    assert len(cluster.nodes) == 8
    assert cluster.bandwidth.sum() == pytest.approx(TOTAL_BANDWIDTH)
    assert np.all(cluster.bandwidth[~np.eye(8, dtype=bool)] > 0)


@pytest.mark.parametrize("network", Network)
def test_each_network_can_be_emulated_from_its_file(network: Network) -> None:
    read = parse_network(dump_network(eight_nodes(network).cluster))
    wan = Wan(read)
    assert wan.link("n0", "n7").latency == pytest.approx(read.latency[0, 7])
    assert wan.link("n0", "n7").rate == pytest.approx(read.bandwidth[0, 7])
