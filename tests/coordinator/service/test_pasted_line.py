"""The line that a person pastes, and the description of its target: `service/pasted_line.py`."""

from __future__ import annotations

import pytest

from dtfm.coordinator.service.pasted_line import pasted_line, where_it_leads
from dtfm.protos.identity.access import Role
from dtfm.protos.run_file.run_file import parse_run
from tests.coordinator.script import run_table


def test_a_node_is_told_what_to_allow_and_others_are_not() -> None:
    run = parse_run(
        run_table(data={"source": "/my data/*.txt"}, checkpoint={"uri": "/mnt/shared"}, model={"family": "gpt2"}),
        "here",
    )
    node = pasted_line("dtfm1.x", Role.NODE, run)
    assert node == "dtfm-node join dtfm1.x --allow-data '/my data/*.txt' --allow-data /mnt/shared"
    assert pasted_line("", Role.NODE, run).startswith("dtfm-node join --allow-data ")
    assert pasted_line("dtfm1.x", Role.VIEWER, run) == "dtfm-coordinator watch dtfm1.x"
    assert pasted_line("dtfm1.x", Role.NODE, parse_run({}, "here")) == "dtfm-node join dtfm1.x"


@pytest.mark.parametrize(
    ("addresses", "warning"),
    [
        (["192.168.1.5:7400", "10.0.0.1:7400"], "private"),
        (["100.101.1.2:7400"], "private"),
        (["[fe80::1]:7400", "[fd00::1]:7400"], "private"),
        (["127.0.0.1:7400"], "this machine alone"),
        (["localhost:7400", "[::1]:7400"], "this machine alone"),
        (["127.0.0.1:7400", "192.168.1.5:7400"], "private"),
        (["192.168.1.5:7400", "8.8.8.8:7400"], ""),
        (["run.example.org:7400"], ""),
    ],
)
def test_it_is_said_who_can_reach_none_of_the_addresses(addresses: list[str], warning: str) -> None:
    said = where_it_leads(addresses)
    listed, _, what = said.partition(": ")
    assert listed == ", ".join(addresses)
    assert what.startswith(warning)
    assert bool(what) == bool(warning)
    if warning == "private":
        assert said.endswith("serve --advertise PUBLIC_IP:7400")
