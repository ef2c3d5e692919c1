"""In an open run, one replica cannot drown the others' gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.cluster.launch import Cluster
from tests.cluster.runs import run_file

NODES = ("a", "b", "c", "d")


def poisoned(factor: float, *poisoners: str) -> Callable[[str, list[str]], list[str]]:
    def place(name: str, command: list[str]) -> list[str]:
        if name not in poisoners:
            return command
        at = command.index("dtfm.node.cli")
        return [*command[:at], "tests.attacks.poisoner", str(factor), *command[at + 1 :]]

    return place


def test_what_one_of_four_adds_thirty_times_over_is_clipped_and_the_log_says_whose(tmp_path: Path) -> None:
    text = run_file(stages=[4], steps=20) + '\n[trust]\nmode = "open"\n'
    with Cluster(tmp_path, text, place=poisoned(-30, "d"), nodes=NODES) as cluster:
        assert cluster.finish() == 0
    clipped = cluster.of("gradients_clipped")
    assert len(clipped) >= 19
    for event in clipped:
        honest = {by: whose for by, whose in event["times"].items() if by != "d"}
        assert set(honest) == {"a", "b", "c"}
        assert all(set(whose) == {"d"} for whose in honest.values())
