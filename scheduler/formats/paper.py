"""The paper's cases, for readers who want to reproduce its tables: five networks of 64 nodes, and the GPT-3 1.3B that it
trains.

Source: DS3Lab/DT-FM, scheduler/heuristic_evolutionary_solver/config.py (commit 69f05e5): one-way delays in ms and bandwidths in
Gbps per pair of AWS regions, measured by its authors (arXiv 2206.01288, section 4.1). Nodes are in region order. In four of the
five networks that order is already a good plan: shuffle the nodes before you judge a search.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import numpy as np

from dtfm.scheduler.model.cluster import Cluster, Node
from dtfm.scheduler.model.workload import Layer, PaperCosts, Workload

PREFIX = "paper:"
"""Begins a case's name where the path of a NETWORK.json could stand too."""
HIDDEN, SEQUENCE = 2048, 2048
"""GPT-3 1.3B: the hidden size, and the tokens of a sample."""
LAYERS, BATCH = 24, 1024
"""The job that the paper plans most: its layers, and the samples in a step."""
COSTS = PaperCosts(stages=8, replicas=8, gradient_gigabytes=0.65, activation_gigabytes=2024 * 2 * 1.25e5 / 2**30)
"""The numbers of the published scheduler (scheduler.py there, commit cda948f): the 1.3 billion gradients of 24 layers, 4 bytes
each; and an eighth of a million tokens' activations, 2 bytes each. Its hidden size is 2024 there, and a gigabyte 2**30 bytes."""


class Network(StrEnum):
    DATA_CENTER = "data-center"
    SPOT = "spot"
    UNIVERSITIES = "universities"
    REGIONAL = "regional"
    WORLDWIDE = "worldwide"


_BETWEEN = {
    ("Oregon", "Virginia"): (67, 0.79),
    ("Oregon", "Ohio"): (49, 1.10),
    ("Oregon", "Tokyo"): (96, 0.523),
    ("Oregon", "Seoul"): (124, 0.46),
    ("Oregon", "London"): (136, 0.42),
    ("Oregon", "Frankfurt"): (143, 0.404),
    ("Oregon", "Ireland"): (124, 0.482),
    ("Virginia", "Ohio"): (11, 1.12),
    ("Virginia", "Tokyo"): (143, 0.524),
    ("Virginia", "Seoul"): (172, 0.500),
    ("Virginia", "London"): (76, 1.16),
    ("Virginia", "Frankfurt"): (90, 1.02),
    ("Virginia", "Ireland"): (67, 1.05),
    ("Ohio", "Tokyo"): (130, 0.694),
    ("Ohio", "Seoul"): (159, 0.529),
    ("Ohio", "London"): (86, 1.05),
    ("Ohio", "Frankfurt"): (99, 0.799),
    ("Ohio", "Ireland"): (77, 1.14),
    ("Tokyo", "Seoul"): (34, 1.10),
    ("Tokyo", "London"): (210, 0.366),
    ("Tokyo", "Frankfurt"): (223, 0.36),
    ("Tokyo", "Ireland"): (199, 0.465),
    ("Seoul", "London"): (238, 0.342),
    ("Seoul", "Frankfurt"): (235, 0.358),
    ("Seoul", "Ireland"): (228, 0.335),
    ("London", "Frankfurt"): (14, 1.14),
    ("London", "Ireland"): (12, 1.09),
    ("Frankfurt", "Ireland"): (24, 1.08),
}
_WORLD = ("Oregon", "Virginia", "Ohio", "Tokyo", "Seoul", "London", "Frankfurt", "Ireland")

_REGIONAL = {
    ("Virginia", "Oregon"): (67, 1.15),
    ("Virginia", "California"): (59, 1.05),
    ("Virginia", "Ohio"): (11, 1.12),
    ("Oregon", "California"): (12, 1.25),
    ("Oregon", "Ohio"): (49, 1.10),
    ("California", "Ohio"): (52, 1.02),
}


def paper_case(name: str) -> Network:
    """The case of this name, with or without PREFIX. Raises ValueError, which lists the five cases."""
    try:
        return Network(name.removeprefix(PREFIX))
    except ValueError:
        cases = ", ".join(PREFIX + network for network in Network)
        raise ValueError(f"{name!r:.80} is none of the paper's networks; there are {cases}") from None


def paper_network(network: Network) -> Cluster:
    """One of the five networks, in region order. Nodes are as fast and as large as an NVIDIA V100 (the paper's p3.2xlarge)."""
    match network:
        case Network.DATA_CENTER:
            regions = [f"instance-{index // 8}" for index in range(64)]
            return _cluster(regions, {}, within=(0, 100), between=(0, 3.125))
        case Network.SPOT:
            # Eight instances with 4 GPUs each, and 32 with one GPU each.
            regions = [f"instance-{index // 4 if index < 32 else index}" for index in range(64)]
            return _cluster(regions, {}, within=(0, 100), between=(0, 1.25))
        case Network.UNIVERSITIES:
            regions = ["Ohio"] * 32 + ["Virginia"] * 32
            return _cluster(regions, {("Ohio", "Virginia"): (11, 1.12)}, within=(1, 5))
        case Network.REGIONAL:
            regions = [name for name in ("Virginia", "Oregon", "California", "Ohio") for _ in range(16)]
            return _cluster(regions, _REGIONAL, within=(5, 2))
        case Network.WORLDWIDE:
            return _cluster([city for city in _WORLD for _ in range(8)], _BETWEEN, within=(5, 2))


def paper_workload(layers: int = LAYERS, batch: int = BATCH) -> Workload:
    """GPT-3 1.3B with this number of equal layers, in fp16, and one sample in each micro-batch. ``paper`` is COSTS for any number
    of layers and samples."""
    parameters = 12 * HIDDEN**2
    layer = Layer(
        "block",
        forward_flops=2 * parameters * SEQUENCE,
        parameter_bytes=2 * parameters,
        activation_bytes=2 * HIDDEN * SEQUENCE,
    )
    return Workload((layer,) * layers, batch, optimizer_bytes_per_parameter_byte=4.0, paper=COSTS)


def _cluster(
    regions: list[str],
    pairs: Mapping[tuple[str, str], tuple[float, float]],
    within: tuple[float, float],
    between: tuple[float, float] = (0, 0),
) -> Cluster:
    count = len(regions)
    delay, gigabits = np.zeros((count, count)), np.zeros((count, count))
    for i, a in enumerate(regions):
        for j, b in enumerate(regions):
            delay[i, j], gigabits[i, j] = within if a == b else pairs.get((a, b)) or pairs.get((b, a)) or between
    nodes = tuple(Node(f"n{index}", 50e12, 16e9, region) for index, region in enumerate(regions))
    return Cluster(nodes, delay / 1e3, gigabits * 1e9 / 8)
