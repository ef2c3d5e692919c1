"""The cluster that the planner is asked about: `core/planner_input.py`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dtfm.coordinator.config.run_file import read_run_file
from dtfm.coordinator.core.planner_input import BITS_PER_ELEMENT, bytes_ratio, measured_cluster
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import Carried, Ledger, Member, fold
from dtfm.kernels.codec import Codec, encoded_bytes


@pytest.mark.parametrize(
    ("network", "precision", "ratio"),
    [
        ('compression = "off"', "fp32", 1.0),
        ('compression = "raw16"', "fp32", 0.5),
        ('compression = "auto"', "fp32", 8.0625 / 32),
        ('compression = "auto"', "fp64", 8.0625 / 64),
        ('compression = "i4h64"\ngradients = "i8b256"', "fp32", 8.0625 / 32),
        ('compression = "i8b256"\nreduction = "topk"', "fp32", 8.0625 / 32),
        ('compression = "i8b256"\nactivations = "off"', "fp32", 1.0),
    ],
)
def test_a_byte_on_a_link_counts_for_what_the_codec_leaves_of_it(
    tmp_path: Path, network: str, precision: str, ratio: float
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'[train]\nprecision = "{precision}"\n[network]\n{network}\n')
    assert bytes_ratio(read_run_file(path)) == ratio


@pytest.mark.parametrize("codec", [codec for codec in Codec if codec is not Codec.OFF], ids=lambda codec: codec.name)
def test_the_coordinators_bits_per_element_are_those_of_the_kernels(codec: Codec) -> None:
    assert BITS_PER_ELEMENT[codec.name.lower()] == 8 * encoded_bytes(codec, 1 << 20, torch.float32) / (1 << 20)


def test_a_link_that_was_not_measured_counts_as_the_median_of_those_that_were() -> None:
    member = Member("", ev.DeviceSeen("cpu", "", 1, 1e9), "")
    links = {
        "a": {"b": ev.Link("a", "b", 0.1, 100.0), "c": ev.Link("a", "c", 0.3, 300.0)},
        "b": {"a": ev.Link("b", "a", 0.2, 200.0)},
    }
    cluster = measured_cluster(Ledger(members=dict.fromkeys("abc", member), links=links), ["a", "b", "c"], 0.25)
    assert cluster.bandwidth.tolist() == [[0, 100, 300], [200, 0, 200], [200, 200, 0]]
    assert cluster.latency == pytest.approx(np.array([[0, 0.1, 0.3], [0.2, 0, 0.2], [0.2, 0.2, 0]]))
    assert cluster.ratio is not None
    assert (cluster.ratio == 0.25).all()


def test_a_connection_that_was_not_measured_counts_as_the_median_of_those_that_were() -> None:
    seen = ev.DeviceSeen("cpu", "", 1, 1e9)
    names = ["a", "b", "c"]
    links = {a: {b: ev.Link(a, b, 0.1, 100.0) for b in names if b != a} for a in names}
    members = {name: Member("", seen, "") for name in names}
    unknown = measured_cluster(Ledger(members=members, links=links), names, 1.0)
    assert [node.up for node in unknown.nodes] == [None] * 3
    some = members | {
        "b": Member("", seen, "", up=Carried(200.0)),
        "c": Member("", seen, "", up=Carried(180.0), down=Carried(50.0)),
    }
    cluster = measured_cluster(Ledger(members=some, links=links), names, 1.0)
    assert [node.up for node in cluster.nodes] == [190.0, 200.0, 180.0]
    assert [node.down for node in cluster.nodes] == [100.0] * 3  # c's links are faster than what its connection carried


def measured_with(peers: int, together: float) -> Carried | None:
    """What is known of the connection of a node that sent 100 bytes/s to each of its ``peers`` alone, and this much to all
    ``together``."""
    joined = ev.NodeJoined("a", "first contact", "", ev.DeviceSeen("cpu", "", 1, 1e9), "0.1", "1f")
    links = tuple(ev.Link("a", f"n{number}", 0.1, 100.0) for number in range(peers))
    return fold([joined, ev.LinksMeasured("a", links, up=together)]).members["a"].up


def test_a_few_links_that_do_not_slow_each_other_down_give_only_a_lower_bound() -> None:
    assert measured_with(3, 280.0) == Carried(280.0, least=True)
    assert measured_with(3, 110.0) == Carried(110.0)  # they share a line
    assert measured_with(6, 500.0) == Carried(500.0)


def test_a_connection_with_only_a_lower_bound_counts_like_the_others() -> None:
    seen = ev.DeviceSeen("cpu", "", 1, 1e9)
    names = ["a", "b", "c"]
    links = {a: {b: ev.Link(a, b, 0.1, 100.0) for b in names if b != a} for a in names}

    def ups(**carried: Carried) -> list[float | None]:
        members = {name: Member("", seen, "", up=carried.get(name)) for name in names}
        return [node.up for node in measured_cluster(Ledger(members=members, links=links), names, 1.0).nodes]

    assert ups(a=Carried(150.0, least=True), b=Carried(300.0)) == [300.0, 300.0, 300.0]
    assert ups(a=Carried(150.0, least=True), b=Carried(125.0)) == [150.0, 125.0, 125.0]
    assert ups(a=Carried(150.0, least=True)) == [150.0, 100.0 * 1.5, 100.0 * 1.5]
