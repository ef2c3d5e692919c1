"""The line for the lender of a device, made of the coordinator's messages."""

from __future__ import annotations

from typing import Any

from dtfm.node.training.status import Status
from dtfm.protos.control_pb2 import Commit, RunStatus, Standby, Welcome
from dtfm.scheduler.model.plan import Plan, Stage

PLAN = Plan(3, (Stage((0, 5), ("a", "b"), (6, 2)), Stage((5, 10), ("c",), (8,))), ())


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def fares(step: int, **changes: Any) -> RunStatus:
    """How the run fares after a step of 1,000 tokens and two seconds, with some fields changed."""
    fields = {"step": step, "steps": 2000, "generation": 3, "loss": 3.25, "tokens": 1000, "seconds": 2.0}
    return RunStatus(**{**fields, **changes})


def committed(step: int, **changes: Any) -> Commit:
    return Commit(generation=3, step=step, status=fares(step, **changes))


def test_a_line_says_how_the_run_fares_what_this_node_does_and_what_it_has_done() -> None:
    clock = Clock()
    status = Status("b", "idle", clock)
    assert status.line() == status.last_line() == ""
    status.welcomed(Welcome(status=fares(198)))
    assert status.last_line() == "", "a node that did nothing does not say that it took part"
    status.welcomed(Welcome(worked_steps=40, status=fares(198)))  # by an earlier process of this node
    status.assigned(PLAN)
    status.committed(committed(199))
    status.committed(committed(200))
    assert status.line() == (
        "step 200 of 2,000, loss 3.2500, 500 tokens/s, 1:00:00 left | "
        "this node: 2 of 8 micro-batches, layers 0-4 of 10; 42 steps done (4 micro-batches since it started)"
    )
    clock.now += 5
    assert "0:59:55 left" in status.line(), "it counts down during a step"
    assert status.last_line() == "This node took part: 42 steps done (4 micro-batches since it started)"


def test_a_step_whose_whole_time_is_not_known_says_nothing_of_speed() -> None:
    status = Status("b", "idle", Clock())
    status.told(fares(200))
    status.told(fares(201, tokens=10**9, seconds=0.0))
    assert ", 500 tokens/s" in status.line()


def test_what_is_waited_for_stands_in_place_of_the_speed() -> None:
    status = Status("b", "idle", Clock())
    status.told(fares(200))
    status.told(fares(200, waiting="c left: 1 of 2 nodes are ready"))
    assert status.line().startswith("step 200 of 2,000, loss 3.2500, waiting: c left: 1 of 2 nodes are ready | ")
    said = "waiting: the coordinator does not answer: no route"
    assert status.line("the coordinator does not answer: no route").startswith(
        f"step 200 of 2,000, loss 3.2500, {said} | "
    )
    status.told(fares(200))
    assert "500 tokens/s" in status.line()


def test_before_the_first_step_there_is_no_loss() -> None:
    status = Status("b", "idle", Clock())
    status.told(RunStatus(steps=60, waiting="1 of 2 nodes are ready"))
    assert status.line() == (
        "step 0 of 60, waiting: 1 of 2 nodes are ready | this node: idle; 0 steps done (0 micro-batches since it started)"
    )


def test_a_node_without_a_part_says_what_it_is_instead_and_earns_no_step() -> None:
    status = Status("b", "ready to step in", Clock())
    status.assigned(PLAN)
    status.told(fares(200, generation=4))
    assert "this node: ready to step in; 0 steps done" in status.line()
    status.stands_by(Standby(number=1, first_layer=5, past_last_layer=10))
    assert "this node: copies layers 5-9, to step in at once; 0 steps" in status.line()
    status.stands_by(Standby())
    assert "this node: ready to step in" in status.line()


def test_a_commit_that_comes_again_after_a_welcome_counts_once() -> None:
    """The coordinator was gone in between, and its log has the step."""
    status = Status("b", "idle", Clock())
    status.assigned(PLAN)
    status.welcomed(Welcome(worked_steps=41, status=fares(199)))
    status.committed(committed(199))
    status.committed(committed(200))
    assert "42 steps done (4 micro-batches since it started)" in status.line()
