"""An operator pauses a run, goes on with it, or stops it: `core/steering.py`."""

from __future__ import annotations

import pytest

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.phases import Gathering, Pausing, Stepping, Switching
from dtfm.coordinator.core.step.commits import learning_rate
from dtfm.coordinator.core.timeouts import GRACE_LEASES
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from dtfm.protos.checkpoint_names import gathering_folder
from dtfm.protos.control_pb2 import SteerRequest
from dtfm.protos.run_file.run_file import parse_run
from tests.coordinator.doors import Door
from tests.coordinator.islands import ROUNDS, each_alone, exchange
from tests.coordinator.script import LEASE, LONG, World, restarted, training

ISLANDS = {"rounds": ROUNDS, "steps": 12, "evaluate_every": 0}


def steer(world: World, wish: SteerRequest.Wish, by: str = "operator", key: str = "", value: object = "") -> str:
    """The coordinator's sentence."""
    Door(world)
    world.feed(t.Asked(1, SteerRequest(wish=wish, key=key, value=str(value)), by, 0.0))
    if (refused := world.refusals.pop(1, None)) is not None:
        return str(refused)
    granted = world.granted[1]
    assert isinstance(granted, wire.Done)
    return granted.sentence


def set_key(world: World, key: str, value: object) -> str:
    return steer(world, SteerRequest.SET, key=key, value=value)


def paused() -> World:
    """Step 1 is committed, and the run paused after it."""
    world = training(**LONG)
    steer(world, SteerRequest.PAUSE)
    world.step()
    world.apply()
    return world


def test_no_step_begins_after_the_one_in_hand_until_the_run_goes_on() -> None:
    world = training(**LONG)
    assert steer(world, SteerRequest.PAUSE).startswith("operator paused the run: no step begins until")
    assert isinstance(world.state.phase, Stepping), "the step in hand goes on"
    world.step()
    commit = world.last_to("a", "commit")
    assert (commit.step, commit.pause, commit.snapshot) == (1, True, True)
    world.apply()
    assert isinstance(world.state.phase, Gathering)
    assert "operator paused the run" in world.events(ev.Waiting)[-1].reason
    world.save()
    assert world.exit_code is None
    assert set(world.state.members.sessions) == {"a", "b"}
    begun = world.kinds_to("a").count("begin")
    assert steer(world, SteerRequest.CONTINUE) == "the run goes on"
    world.settle()
    assert world.kinds_to("a").count("begin") == begun + 1
    world.step()
    assert [event.step for event in world.events(ev.StepCommitted)] == [1, 2]
    assert not world.events(ev.RolledBack)


def test_a_plan_that_has_just_been_adopted_does_not_begin_during_a_pause() -> None:
    world = training("a", "b", "c", **LONG)
    world.lose("c")
    assert isinstance(world.state.phase, Switching)
    steer(world, SteerRequest.PAUSE)
    world.settle()
    assert isinstance(world.state.phase, Gathering)
    steer(world, SteerRequest.CONTINUE)
    world.settle()
    assert isinstance(world.state.phase, Stepping)


def test_a_pause_outlives_the_coordinator() -> None:
    world = restarted(paused(), **LONG)
    world.join("a", "b")
    assert isinstance(world.state.phase, Gathering)
    assert not world.wanted
    steer(world, SteerRequest.CONTINUE)
    world.settle()
    assert isinstance(world.state.phase, Stepping)


def test_a_run_stops_once_its_last_step_is_in_a_checkpoint_and_is_not_over() -> None:
    world = training(**LONG)
    assert steer(world, SteerRequest.STOP).startswith("operator stops the run")
    world.step()
    world.apply()
    assert isinstance(world.state.phase, Pausing), "the checkpoint is not whole"
    assert world.exit_code is None
    world.save()
    assert world.exit_code == 0
    [stopped] = world.events(ev.RunStopped)
    assert stopped.step == 1
    assert stopped.reason.startswith("operator stopped the run after step 1; ")
    assert world.last_to("a", "finish") == wire.Finish(stopped=True, reason=stopped.reason)
    assert world.refolded().outcome is None
    assert world.refolded().hold is None
    world.lose("a")
    assert world.log[-1] == stopped, "a reserve sees that it is not needed"
    again = restarted(world, **LONG)
    again.join("a", "b")
    again.settle()
    assert again.last_to("a", "begin").step == 2


def test_a_checkpoint_that_fails_is_tried_again_before_the_run_stops() -> None:
    world = training(**LONG)
    steer(world, SteerRequest.STOP)
    world.step()
    world.apply()
    world.write_checkpoint(problem="the storage is full")
    assert world.exit_code is None
    world.wait(3 * LEASE, beating=("a", "b"))
    world.save()
    assert world.exit_code == 0
    assert [event.step for event in world.events(ev.RunStopped)] == [1]


def test_a_paused_run_stops_at_once_if_its_state_is_safe_already() -> None:
    world = paused()
    world.save()
    for node in "ab":  # nothing is needed of them
        world.lose(node)
    steer(world, SteerRequest.STOP)
    assert world.exit_code == 0
    assert [event.step for event in world.events(ev.RunStopped)] == [1]


def test_a_paused_run_whose_state_is_not_safe_writes_it_first() -> None:
    world = paused()
    world.write_checkpoint(problem="the storage is full")
    steer(world, SteerRequest.STOP)
    assert world.exit_code is None
    world.settle()
    world.apply()
    world.save()
    assert world.exit_code == 0
    assert [event.step for event in world.events(ev.StepCommitted)] == [1], "no step is trained for it"


def test_a_stop_that_is_taken_back_stops_nothing() -> None:
    world = training(**LONG)
    steer(world, SteerRequest.STOP)
    steer(world, SteerRequest.CONTINUE)
    world.step()
    assert isinstance(world.state.phase, Stepping)
    assert steer(world, SteerRequest.CONTINUE) == "the run is not paused"


def test_stopping_now_waits_for_nothing_and_says_what_is_left() -> None:
    world = training(**LONG)
    world.step()
    assert steer(world, SteerRequest.STOP_NOW) == "the run stops now"
    assert world.exit_code == 0
    assert "after step 1, and the newest checkpoint is of step 0" in world.events(ev.RunStopped)[0].reason
    assert steer(world, SteerRequest.PAUSE) == "the run has stopped after step 1"


def test_a_run_that_nobody_trains_stops_without_them_but_waits_for_those_who_may_return() -> None:
    world = training(**LONG)
    world.step()
    steer(world, SteerRequest.STOP)
    again = restarted(world, **LONG)
    again.wait(GRACE_LEASES * again.state.lease - 1)
    assert again.exit_code is None
    again.wait(1)
    assert again.exit_code == 0
    fresh = World()
    steer(fresh, SteerRequest.STOP)
    assert fresh.exit_code == 0, "nothing is trained yet"


@pytest.mark.parametrize("wish", SteerRequest.Wish.values())
def test_only_operators_steer(wish: SteerRequest.Wish) -> None:
    world = training(**LONG)
    Door(world).enrolled("viewer", "viewer")
    assert "this is for the role operator" in steer(world, wish, by="viewer")
    assert not world.events(ev.RunPaused) + world.events(ev.RunStopped)


def test_more_steps_while_the_run_goes_on_change_its_end_and_the_learning_rate_from_the_next_commit_on() -> None:
    world = training(train={"steps": 3, "evaluate_every": 0})
    world.step()
    begun = world.last_to("a", "commit").learning_rate
    assert set_key(world, "train.steps", 5) == "operator set train.steps to 5; it was 3"
    assert [told.steps for told in world.told[world.streams["a"]]][-1] == 5
    world.step()
    assert begun > world.last_to("a", "commit").learning_rate == rate_of(world, steps=5) > rate_of(world, steps=3)
    for _ in range(2):
        world.step()
        assert not world.last_to("a", "commit").pause
    world.step()
    assert world.last_to("a", "commit").pause
    world.evaluate()
    world.apply()
    world.save()
    assert [event.step for event in world.events(ev.RunFinished)] == [5]


@pytest.mark.parametrize(
    ("key", "value"), [("train.learning_rate", 0.5), ("train.clip_norm", 0.25), ("train.weight_decay", 0)]
)
def test_what_an_operator_sets_of_the_optimizer_holds_from_the_next_step_on(key: str, value: float) -> None:
    name = key.removeprefix("train.")

    def told(commit: wire.Commit) -> float:
        """The gradients' norm is 2 in each step."""
        (factor,) = {clip.factor for clip in commit.clips}
        return factor * 2.0 if name == "clip_norm" else float(getattr(commit, name))

    settings = {**LONG, "train": {**LONG["train"], "schedule": "constant", "warmup_steps": 0}}
    world = training("a", "b", "c", **settings)
    before = getattr(world.state.run.train, name)
    world.step()
    assert told(world.last_to("a", "commit")) == pytest.approx(before)
    assert set_key(world, key, value) == f"operator set {key} to {float(value)}, from step 2 on; it was {before}"
    world.lose("a")  # with the next plan nodes hear of the commit of step 1 again
    world.settle()
    assert told(world.last_to("b", "assignment").last_commit) == pytest.approx(before)
    world.step()
    for node in world.plan_in_force.nodes:
        assert told(world.last_to(node, "commit")) == pytest.approx(value)
    ledger = restarted(world, **settings).state.ledger
    assert getattr(ledger.training.optimizer, name) == getattr(ledger.optimizer, name) == value


def test_a_learning_rate_is_told_as_the_schedule_makes_it() -> None:
    world = training(train={"steps": 500, "warmup_steps": 10, "evaluate_every": 0})
    world.step()
    assert set_key(world, "train.learning_rate", 0.01).endswith("it was 0.003. In step 2 the schedule makes it 0.002")
    world.step()
    assert world.last_to("a", "commit").learning_rate == 0.002


def test_with_rounds_it_holds_from_the_next_round_on_also_over_a_crash() -> None:
    world = each_alone("a", "b", "c", train={**ISLANDS, "schedule": "constant", "warmup_steps": 0})
    world.step()
    assert set_key(world, "train.learning_rate", 0.5).startswith(
        "operator set train.learning_rate to 0.5, from step 4 on; it was 0.003"
    )
    set_key(world, "train.weight_decay", 0.75)
    ledger = world.refolded()
    assert (ledger.optimizer.learning_rate, ledger.optimizer.weight_decay) == (0.003, 0.1)
    seen = list[tuple[int, float, float]]()
    while len(seen) < 2 * ROUNDS:
        if world.state.ledger.training.step % (ROUNDS + 1) == ROUNDS:
            exchange(world)
        else:
            world.step()
        commit = world.last_to("a", "commit")
        seen.append((commit.step, commit.learning_rate, commit.weight_decay))
    assert seen == [(2, 0.003, 0.1), (3, 0.003, 0.1), (4, 0.5, 0.75), (5, 0.5, 0.75)]


def rate_of(world: World, steps: int) -> float:
    train = type(world.state.message.train)()
    train.CopyFrom(world.state.message.train)
    train.steps = steps
    return learning_rate(train, world.state.ledger.training.step)


def test_fewer_steps_than_are_trained_are_refused() -> None:
    world = training()
    world.step()
    assert "train.steps = 1: must be at least 2, as 1 steps are trained" in set_key(world, "train.steps", 1)
    assert not world.events(ev.RunChanged)
    set_key(world, "train.steps", 2)
    world.step()
    assert world.last_to("a", "commit").pause


def test_a_run_that_is_over_goes_on_from_its_last_checkpoint_with_more_steps() -> None:
    world = training()
    world.finish_run()
    assert world.exit_code == 0
    assert set_key(world, "checkpoint.every", 7) == (
        "the run is over; set train.steps to more than it has, and it goes on"
    )
    for node in "ab":
        world.lose(node)
    set_key(world, "train.steps", 4)
    assert world.refolded().outcome is None
    world.join("a", "b", incarnation=2)
    world.settle()
    assert world.last_to("a", "assignment").snapshot.folder.endswith("step-00000003")
    world.step()
    assert [event.step for event in world.events(ev.StepCommitted)] == [1, 2, 3, 4]
    world.evaluate()
    world.apply()
    world.save()
    assert [event.step for event in world.events(ev.RunFinished)] == [3, 4]


def test_a_failed_run_has_no_more_steps() -> None:
    world = training()
    world.feed(t.StopAsked("Ctrl-C"))
    assert set_key(world, "train.steps", 9) == "the run has stopped after step 0"


def test_the_log_has_the_run_file_and_what_was_made_of_it() -> None:
    world = training(**LONG)
    set_key(world, "checkpoint.every", 1)
    ledger = world.refolded()
    assert (ledger.file["checkpoint"]["every"], ledger.run["checkpoint"]["every"]) == (0, 1)
    assert parse_run(ledger.run, "the log") == world.state.run


def test_a_last_checkpoint_that_cannot_be_sent_goes_to_the_place_that_an_operator_names() -> None:
    world = training(train={"steps": 1, "evaluate_every": 0})
    world.step()
    world.evaluate()
    world.apply()
    world.write_checkpoint(problem="the storage is full")
    assert isinstance(world.state.phase, Pausing)
    set_key(world, "checkpoint.uri", "file:///elsewhere")
    assert world.last_to("a", "move").folder == gathering_folder(
        "file:///elsewhere", 1, world.state.ledger.run_id
    )  # at once
    world.save()
    assert world.manifests[-1].folder == "file:///elsewhere/step-00000001"
    assert [event.folder for event in world.events(ev.CheckpointWritten)] == ["file:///elsewhere/step-00000001"]
    assert world.exit_code == 0


def test_a_checkpoint_under_way_is_finished_where_it_began() -> None:
    world = training(**{**LONG, "checkpoint": {"every": 1}})
    world.step()
    before = world.state.run.checkpoints
    world.write_snapshot()
    set_key(world, "checkpoint.uri", "file:///elsewhere")
    world.save()
    assert world.manifests[-1].folder == f"{before}/step-00000001"
    assert world.events(ev.CheckpointWritten)[-1].folder == f"{before}/step-00000001"
    world.step()
    world.write_snapshot()
    assert world.last_to("a", "move").folder == gathering_folder("file:///elsewhere", 2, world.state.ledger.run_id)


def test_with_a_shorter_lease_silence_counts_from_when_nodes_are_told_of_it() -> None:
    world = paused()
    world.wait(LEASE / 2)
    set_key(world, "cluster.lease", LEASE / 10)
    told = world.told[world.streams["a"]][-1]
    assert (told.lease_seconds, told.heartbeat_seconds) == (LEASE / 10, LEASE / 40)
    world.wait(LEASE / 20)
    assert not world.events(ev.NodeLeft)
    world.wait(LEASE / 10, beating=["a"])
    [left] = world.events(ev.NodeLeft)
    assert (left.node, left.reason) == ("b", f"no sign of life for {LEASE / 10:g} seconds")


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        (
            "train.warmup_steps",
            1,
            "'train.warmup_steps' cannot be set while the run goes on. These can: train.learning_rate, ",
        ),
        ("train.learning_rate", 0, "train.learning_rate = 0: must be above 0"),
        ("train.learning_rate", "nan", "train.learning_rate = nan: must be"),
        ("train.learning_rate", "fast", "train.learning_rate = 'fast': must be a number"),
        ("train.clip_norm", "inf", "train.clip_norm = inf: must be"),
        ("train.weight_decay", -1, "train.weight_decay = -1: must be at least 0"),
        ("", "", "'' cannot be set"),
        ("checkpoint.uri", "ftp://x", "checkpoint.uri = 'ftp://x': names 'ftp://x', which no run may use"),
        ("checkpoint.keep", "many", "checkpoint.keep = 'many': must be a whole number"),
        ("train.steps", 10**9, "train.steps = 1000000000: must be at most 100000000"),
        ("checkpoint.every", 0, "checkpoint.every is 0 already"),
    ],
)
def test_what_cannot_be_set_changes_nothing(key: str, value: object, sentence: str) -> None:
    world = training(**LONG)
    before = world.state.run
    assert sentence in set_key(world, key, value)
    assert world.state.run is before
    assert not world.events(ev.RunChanged)


def save(world: World) -> int:
    """The step whose weights will be in a checkpoint."""
    steer(world, SteerRequest.SAVE)
    reply = world.granted[1]
    assert isinstance(reply, wire.Done)
    return reply.step


def test_the_weights_of_the_step_in_hand_are_fetched_between_two_checkpoints() -> None:
    world = training(**LONG)
    world.step()
    assert not world.last_to("a", "commit").snapshot
    assert save(world) == 2
    world.step()
    assert world.last_to("a", "commit").snapshot
    assert save(world) == 2, "they are on the way"
    world.save()
    assert save(world) == 2, "they are there"
    world.step()
    assert not world.last_to("a", "commit").snapshot, "once"
    assert world.state.ledger.copies.checkpoints.keys() == {2}


def test_of_a_paused_run_there_are_the_weights_that_the_pause_has_fetched() -> None:
    world = paused()
    assert save(world) == 1
    world.save()
    assert save(world) == 1


def test_a_run_that_is_over_still_has_its_last_weights_and_refuses_a_pause() -> None:
    world = training(train={"steps": 1, "evaluate_every": 0})
    assert save(world) == 1
    world.finish_run()
    assert save(world) == 1
    assert steer(world, SteerRequest.PAUSE).startswith("the run is over: the one step is trained")


def test_a_run_that_stopped_before_any_checkpoint_has_no_weights() -> None:
    world = training(**LONG)
    steer(world, SteerRequest.STOP_NOW)
    assert "there is no checkpoint of it" in steer(world, SteerRequest.SAVE)
