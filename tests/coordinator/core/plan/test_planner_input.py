"""The cluster that the planner is asked about: `core/plan/planner_input.py`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dtfm.coordinator.core.plan.planner_input import measured_cluster
from dtfm.coordinator.core.validation.description import BITS_PER_ELEMENT, as_the_run_says
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.access import Access, Holder
from dtfm.coordinator.log.ledger import Ledger, fold
from dtfm.coordinator.log.members import Member
from dtfm.coordinator.log.reach import Carried
from dtfm.kernels.codec import Codec, encoded_bytes
from dtfm.protos.run_file.run_file import read_run_file
from dtfm.scheduler.cost.exchange import exchange_seconds
from dtfm.scheduler.model.cluster import Line
from dtfm.scheduler.model.plan import Plan, Stage, joined
from dtfm.scheduler.model.workload import Layer, Workload
from tests.coordinator.ledgers import altered
from tests.scheduler.clusters import even_workload, uniform_cluster


@pytest.mark.parametrize(
    ("network", "precision", "activations", "reduction"),
    [
        ('compression = "off"', "fp32", 1.0, 1.0),
        ('compression = "raw16"', "fp32", 0.5, 0.5),
        ('compression = "auto"', "fp32", 8.0625 / 32, 8.0625 / 32),
        ('compression = "auto"', "fp64", 8.0625 / 64, 8.0625 / 64),
        ('compression = "auto"', "bf16", 8.0625 / 16, 8.0625 / 32),
        ('compression = "off"\nreduction = "raw16"', "bf16", 1.0, 0.5),
        ('compression = "i4b64"\nreduction = "raw16"', "bf16", 4.25 / 16, 0.5),
        ('compression = "i4b64"\ngradients = "i8b256"', "fp32", 8.0625 / 32, 4.25 / 32),
        ('compression = "i8b256"\nactivations = "off"', "fp32", 1.0, 8.0625 / 32),
    ],
)
def test_a_byte_counts_for_what_its_own_codec_leaves_of_it(
    tmp_path: Path, network: str, precision: str, activations: float, reduction: float
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'[train]\nprecision = "{precision}"\n[network]\n{network}\n')
    sent = as_the_run_says(Workload((Layer("a", 1.0, 1.0, 1.0),), 1), read_run_file(path))
    assert (sent.sent_per_activation_byte, sent.sent_per_reduced_byte) == (activations, reduction)


@pytest.mark.parametrize(("codec", "bytes_sent"), [("topk", 0.5625 / 32), ("top64", 0.1640625 / 32)])
def test_sparse_changes_go_to_all_and_what_is_left_out_takes_memory(
    tmp_path: Path, codec: str, bytes_sent: float
) -> None:
    """Of the host's memory, 12 bytes for each parameter: its value after the last exchange, and the rest of two exchanges."""
    path = tmp_path / "run.toml"
    path.write_text(f'[network]\nexchange = "{codec}"\n')
    workload = as_the_run_says(Workload((Layer("a", 1.0, 1.0, 1.0),), 1), read_run_file(path)).with_rounds()
    assert (workload.exchanged_with_all, workload.sent_per_exchanged_byte) == (True, bytes_sent)
    assert workload.for_exchanges_per_parameter_byte == 3


def test_the_planner_expects_an_exchange_under_top64_to_take_a_sixth_of_the_time(tmp_path: Path) -> None:
    """Among eight islands of one node each, against "i4b64"."""
    plan = joined([Plan(0, (Stage((0, 2), (f"n{n}",), (1,), island=n),), ()) for n in range(8)], 0)

    def seconds(codec: str) -> float:
        path = tmp_path / f"{codec}.toml"
        path.write_text(f'[network]\nexchange = "{codec}"\n')
        workload = as_the_run_says(even_workload(layers=2, micro_batches=8), read_run_file(path))
        return exchange_seconds(uniform_cluster(8, bandwidth=1e6), workload, plan)

    assert seconds("top64") / seconds("i4b64") == pytest.approx(0.154, abs=0.002)


@pytest.mark.parametrize("codec", [codec for codec in Codec if codec is not Codec.OFF], ids=lambda codec: codec.name)
def test_the_coordinators_bits_per_element_are_those_of_the_kernels(codec: Codec) -> None:
    assert BITS_PER_ELEMENT[codec.name.lower()] == 8 * encoded_bytes(codec, 1 << 20, torch.float32) / (1 << 20)


def test_a_link_that_was_not_measured_counts_as_the_median_of_those_that_were() -> None:
    member = Member("", ev.DeviceSeen("cpu", "", 1, 1e9), "")
    links = {
        "a": {"b": ev.Link("a", "b", 0.1, 100.0), "c": ev.Link("a", "c", 0.3, 300.0)},
        "b": {"a": ev.Link("b", "a", 0.2, 200.0)},
    }
    cluster = measured_cluster(altered(Ledger(), members=dict.fromkeys("abc", member), links=links), ["a", "b", "c"])
    assert cluster.bandwidth.tolist() == [[0, 100, 300], [200, 0, 200], [200, 200, 0]]
    assert cluster.latency == pytest.approx(np.array([[0, 0.1, 0.3], [0.2, 0, 0.2], [0.2, 0.2, 0]]))


def test_a_relay_that_was_not_measured_carries_what_was_seen_to_pass_and_one_that_trains_is_a_node() -> None:
    member = Member("", ev.DeviceSeen("cpu", "", 1, 1e9), "")
    links = {"a": {"b": ev.Link("a", "b", 0.1, 300.0)}, "b": {"a": ev.Link("b", "a", 0.1, 200.0)}}
    ways = {"a": {"b": ev.Way("a", "b", "relay", "r")}, "b": {"a": ev.Way("b", "a", "relay", "c")}}
    ledger = altered(Ledger(), members=dict.fromkeys("abcr", member), links=links, ways=ways)
    cluster = measured_cluster(ledger, ["a", "b", "c"])
    assert cluster.lines == (Line("r", up=300.0, down=300.0),)
    assert cluster.via is not None
    assert cluster.via.tolist() == [[-1, 3, -1], [2, -1, -1], [-1, -1, -1]]


def test_nodes_of_one_machine_share_its_line_which_links_within_say_nothing_of() -> None:
    """a1 and a2 have measured 100 and 40 bytes/s to others together. a3 has their key, as machines with one home folder do, and b
    says that it is beside a1."""
    seen = ev.DeviceSeen("cpu", "", 1, 1e9)
    keys = {"a1": "key a", "a2": "key a", "a3": "key a", "b": "key b"}
    rates = {
        "a1": {"a2": 9e9, "a3": 60.0, "b": 60.0},
        "a2": {"a1": 9e9, "a3": 30.0, "b": 30.0},
        "a3": {"a1": 50.0, "a2": 50.0, "b": 50.0},
        "b": {"a1": 50.0, "a2": 50.0, "a3": 50.0},
    }
    near = {("a2", "a1"), ("b", "a1")}
    ledger = altered(
        Ledger(access=Access({name: Holder(key, "node", "") for name, key in keys.items()})),
        members={name: Member("", seen, "") for name in keys},
        links={
            a: {b: ev.Link(a, b, 0.1, rate, way="loopback" if (a, b) in near else "lan") for b, rate in row.items()}
            for a, row in rates.items()
        },
        carried={"a1": (Carried(100.0), None), "a2": (Carried(40.0), None)},
    )
    cluster = measured_cluster(ledger, list(keys))
    assert [node.line for node in cluster.nodes] == ["the machine of a1"] * 2 + ["", ""]
    assert cluster.lines == (Line("the machine of a1", up=100.0, down=50.0),)


def test_nodes_of_a_machine_that_is_alone_are_on_one_line_which_nothing_passes() -> None:
    seen = ev.DeviceSeen("cpu", "", 1, 1e9)
    ledger = altered(
        Ledger(access=Access({name: Holder("key", "node", "") for name in "ab"})),
        members={name: Member("", seen, "") for name in "ab"},
        links={"b": {"a": ev.Link("b", "a", 0.1, 9e9, way="loopback")}, "a": {"b": ev.Link("a", "b", 0.1, 8e9)}},
    )
    cluster = measured_cluster(ledger, "ab")
    assert cluster.line.tolist() == [2, 2]


def beside(*pairs: str, **carried: Carried) -> Ledger:
    """Nodes a, b and c of one key, and d and e of other machines. All links carry 100 bytes/s up, except d's links, which carry
    10. In each of ``pairs`` the first node reaches the second over loopback. ``carried``: measured connections of nodes, up."""
    seen = ev.DeviceSeen("cpu", "", 1, 1e9)
    keys = {"a": "key", "b": "key", "c": "key", "d": "key d", "e": "key e"}
    return altered(
        Ledger(access=Access({name: Holder(key, "node", "") for name, key in keys.items()})),
        members={name: Member("", seen, "") for name in keys},
        links={
            a: {
                b: ev.Link(a, b, 0.1, 10.0 if a == "d" else 100.0, way="loopback" if a + b in pairs else "lan")
                for b in keys
                if b != a
            }
            for a in keys
        },
        carried={name: (up, None) for name, up in carried.items()},
    )


def test_nodes_are_on_one_machine_if_others_of_it_reach_them() -> None:
    cluster = measured_cluster(beside("ca", "bc"), "abcde")
    assert cluster.line.tolist() == [5, 5, 5, 3, 4]


def test_what_one_node_of_a_machine_has_measured_counts_for_all_of_it() -> None:
    """By d's measure, a connection carries four times its fastest link."""
    measured = beside("ab", "cb", d=Carried(40.0), b=Carried(150.0), c=at_least(190.0))
    assert [line.up for line in measured_cluster(measured, "abcde").lines] == [150.0]


def test_only_a_device_with_a_host_beside_it_has_two_memories() -> None:
    gpu, cpu = ev.DeviceSeen("cuda", "", 10, 1e9, 20), ev.DeviceSeen("cpu", "", 30, 1e9)
    members = {"a": Member("", gpu, ""), "b": Member("", cpu, "")}
    cluster = measured_cluster(Ledger(members=members), ["a", "b"])
    assert [(node.memory_bytes, node.host_memory_bytes) for node in cluster.nodes] == [(10, 20), (30, None)]


NAMES = "abcdefg"
LINKS = {a: {b: ev.Link(a, b, 0.1, 100.0) for b in NAMES if b != a} for a in NAMES}
"""From each node to each other, at 100 bytes/s."""
WHOLE = 600.0
"""What the links of a node carry at most."""


def ups(**carried: Carried) -> dict[str, float | None]:
    """What the nodes' connections count as, where these were measured."""
    seen = ev.DeviceSeen("cpu", "", 1, 1e9)
    members = {name: Member("", seen, "") for name in NAMES}
    both = {name: (up, None) for name, up in carried.items()}
    cluster = measured_cluster(altered(Ledger(), members=members, links=LINKS, carried=both), list(NAMES))
    assert [node.down for node in cluster.nodes] == [None] * len(NAMES)
    return {node.id: node.up for node in cluster.nodes}


def at_least(bandwidth: float) -> Carried:
    return Carried(bandwidth, least=True)


def test_connections_are_unknown_until_one_was_measured() -> None:
    assert ups() == dict.fromkeys(NAMES)


def test_a_connection_that_was_not_measured_counts_as_the_median_of_those_that_were() -> None:
    carried = ups(b=Carried(200.0), c=Carried(180.0), d=Carried(190.0))
    assert carried == {**dict.fromkeys(NAMES, 190.0), "b": 200.0, "c": 180.0}


def test_a_connection_carries_at_least_what_its_fastest_link_does() -> None:
    assert ups(a=Carried(50.0))["a"] == 100.0


def measured_with(peers: int, together: float) -> Carried | None:
    """What is known of the connection of a node that sent 100 bytes/s to each of its ``peers`` alone, and this much to all
    ``together``. It did not reach one more."""
    joined = ev.NodeJoined("a", "first contact", "", ev.DeviceSeen("cpu", "", 1, 1e9), "0.1", "1f")
    links = tuple(ev.Link("a", f"n{number}", 0.1 + number, 100.0) for number in range(peers))
    broken = ev.Link("a", "broken", 0.0, 0.0)
    return fold([joined, ev.LinksMeasured("a", (broken, *links), up=together)]).reach.carried["a"][0]


@pytest.mark.parametrize("peers", [3, 6])
def test_links_that_do_not_slow_each_other_down_give_only_a_lower_bound(peers: int) -> None:
    assert measured_with(peers, 90.0 * peers) == at_least(90.0 * peers)
    assert measured_with(peers, 110.0) == Carried(110.0)  # they share a line


def test_links_within_the_machine_do_not_count_among_those_that_were_measured_together() -> None:
    joined = ev.NodeJoined("a", "first contact", "", ev.DeviceSeen("cpu", "", 1, 1e9), "0.1", "1f")
    links = (
        ev.Link("a", "beside", 1e-5, 5e9, way="loopback"),
        ev.Link("beside", "a", 1e-5, 5e9),
        *(ev.Link("a", each, 0.1, 100.0, way="public") for each in "bc"),
        *(ev.Link(each, "a", 0.1, 100.0) for each in "bc"),
    )
    carried = fold([joined, ev.LinksMeasured("a", links, up=190.0, down=110.0)]).reach.carried["a"]
    assert carried == (at_least(190.0), Carried(110.0))
    alone = fold([joined, ev.LinksMeasured("a", links[:2], up=9e9, down=9e9)])
    assert "a" not in alone.reach.carried, "loopback says nothing of the line"


def test_of_many_links_only_the_nearest_are_measured_together() -> None:
    assert measured_with(20, 780.0) == at_least(780.0)
    assert measured_with(20, 600.0) == Carried(600.0)


def test_connections_that_limit_no_links_count_as_all_of_them() -> None:
    """The first nodes to join had few peers, or none."""
    assert ups(b=at_least(190.0), c=at_least(290.0), g=at_least(590.0)) == dict.fromkeys(NAMES, WHOLE)


def test_a_lower_bound_counts_as_the_median_of_connections_that_carry_as_much() -> None:
    homes = {"d": Carried(100.0), "e": Carried(110.0)}
    carried = ups(a=at_least(90.0), b=at_least(190.0), c=Carried(300.0), f=Carried(120.0), **homes)
    assert carried == {"a": 120.0, "b": 300.0, "c": 300.0, "d": 100.0, "e": 110.0, "f": 120.0, "g": 120.0}
    # Among the connections that carry as much as b's, more than half carry more than 300.
    others = {"c": Carried(300.0), "f": at_least(350.0), "g": at_least(400.0)}
    carried = ups(a=at_least(90.0), b=at_least(190.0), **others, **homes)
    assert carried == {"a": 300.0, "b": WHOLE, "c": 300.0, "d": 100.0, "e": 110.0, "f": WHOLE, "g": WHOLE}


def test_a_node_that_was_not_reached_at_all_has_no_connection() -> None:
    seen = ev.DeviceSeen("cpu", "", 1, 1e9)
    members = {name: Member("", seen, "") for name in "ab"}
    links = {"a": {"b": ev.Link("a", "b", 0.1, 0.0)}, "b": {"a": ev.Link("b", "a", 0.1, 100.0)}}
    cluster = measured_cluster(
        altered(Ledger(), members=members, links=links, carried={"b": (Carried(100.0), None)}), ["a", "b"]
    )
    assert [node.up for node in cluster.nodes] == [None, 100.0]
