"""How this node takes up a plan: an assignment becomes its generation, or the reason why that cannot be."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from dtfm.node.data.holding import Holding
from dtfm.node.host.long_parts import long_part
from dtfm.node.host.trace import Activity, span
from dtfm.node.model.bucket import Bucket
from dtfm.node.model.loaded_run import LoadedRun
from dtfm.node.model.placement import Placement, placement_of, read_plan
from dtfm.node.state.digests import StateDigests
from dtfm.node.state.recovery import Inventory, take_inventory
from dtfm.node.state.state_store import HeldState
from dtfm.node.training.equipment import Equipment
from dtfm.node.training.failure import is_device_lost, plan_failed
from dtfm.node.training.generation import Generation
from dtfm.node.training.generation_setup import free_first, set_up
from dtfm.node.training.standing_by import StandingBy
from dtfm.node.transport.receiver import Closed, Receiver
from dtfm.protos import control_pb2 as wire
from dtfm.protos.places import COORDINATOR
from dtfm.protos.plan_pb2 import Run
from dtfm.scheduler.model.rounds import Rounds

log = logging.getLogger(__name__)
Result = TypeVar("Result")

DeliverTo = Callable[[Receiver | None], None]


class Wait(Protocol):
    """Runs ``work`` on the event loop, and returns its result. Raises Closed when called off."""

    def __call__(self, work: Coroutine[Any, Any, Result], /) -> Result: ...


class Adoption:
    """This node's present generation, and the state that it holds. For the training thread; any thread may read
    ``generation``."""

    def __init__(
        self,
        equipment: Equipment,
        standing_by: StandingBy,
        data: Holding,
        digests: StateDigests,
        report: Callable[[wire.NodeMessage], None],
    ) -> None:
        self.generation: Generation | None = None
        """None while this node has no part in a plan."""
        self._store = equipment.store
        self._standing_by = standing_by
        self._data = data
        self._digests = digests
        self._report = report
        self._earlier: Generation | None = None  # the last one, on which the next may build
        self._committed_in = 0  # the generation whose commit made the held state; 0: none did

    def forget(self) -> None:
        """Holds no state any more: it is of another run."""
        self._store.replace(HeldState())
        self._committed_in = 0

    def end(self) -> None:
        """Ends the present generation. The next one may build on it."""
        if (generation := self.generation) is not None:
            generation.release()
            self._earlier = generation
        self.generation = None

    def begin(self, begin: wire.Begin) -> None:
        """All nodes of the present generation are ready: its first step begins."""
        generation = self.generation
        assert generation is not None
        assert begin.step == self._store.held.step + 1, (begin.step, self._store.held.step)
        generation.neighbours_have(begin.activations, begin.gradients)
        for bucket in generation.stage.buckets.values():
            bucket.donors = ()  # others have the same
        self._hold(begin.step - 1, generation.stage.buckets)

    def apply(self, commit: wire.Commit) -> None:
        """Applies a commit of the present generation to the held state."""
        generation = self.generation
        assert generation is not None
        self._committed_in = commit.generation
        with span(Activity.APPLY, commit.step):
            self._store.apply(commit, partial(generation.apply, commit))
        self._digests.begin(commit.step, generation.stage.buckets.values())  # the next step's vote waits for them

    def adopt(
        self,
        loaded: LoadedRun,
        equipment: Equipment,
        assignment: wire.Assignment,
        deliver_to: DeliverTo,
        wait: Wait,
    ) -> None:
        """Sets up this node's part in the assignment's plan, after `end`, and reports PlanReady or PlanFailed. Raises Closed when
        called off, and the error of a device that is lost."""
        number, train = assignment.generation, loaded.run.train
        held_out = train.evaluation_samples // train.micro_batch
        buckets = loaded.model.buckets
        try:
            layers, micro_batches = len(loaded.model.layers), train.global_batch // train.micro_batch
            plan = read_plan(assignment.plan, layers, micro_batches, assignment.step)
        except ValueError as error:
            self._cannot_adopt(plan_failed(number, error))
            return
        self._drop_other_history(assignment, plan.rounds)
        placement = placement_of(
            plan,
            equipment.node,
            held_out,
            buckets,
            twice=loaded.run.trust.mode == Run.Trust.OPEN,
            trained_before=assignment.trained_before,
            is_new=0 < assignment.island_began == assignment.step,
        )
        try:
            if placement is not None and placement.frees_first:
                free_first(loaded, placement, assignment, self._earlier, equipment)
        except OSError as error:
            self._cannot_adopt(plan_failed(number, error))
            return
        inventory = take_inventory(assignment, buckets, equipment.node, placement, self._store.held)
        begins = placement is not None and placement.is_new  # it needs only the state that islands share
        if inventory.is_incomplete and (begins or self._standing_by.role.is_of_all):  # copies of less are for others
            inventory = replace(inventory, copied=self._take_copies(loaded, assignment, wait))
            self._hold(assignment.step, {**inventory.held, **inventory.copied})
        if lost := inventory.lost:
            problem = f"this node does not have the state of layers {lost} as of step {assignment.step}, as expected"
            self._cannot_adopt(wire.PlanFailed(generation=number, problem=problem, lost=lost))
        elif placement is None:
            log.info("idle in generation %d: %s", number, assignment.reason)
            self._earlier = None
            self._keep_frozen(loaded)
            if inventory.expected:  # it vouches for the state that others may get from it
                self._is_ready(wire.PlanReady(generation=number), assignment.step, inventory.expected.values())
            self._data.begin_early(loaded.data)  # should another node be lost, nobody is to wait for it
            deliver_to(None)
        else:
            self._enter(loaded, equipment, placement, assignment, inventory, deliver_to, wait)

    def _enter(
        self,
        loaded: LoadedRun,
        equipment: Equipment,
        placement: Placement,
        assignment: wire.Assignment,
        inventory: Inventory,
        deliver_to: DeliverTo,
        wait: Wait,
    ) -> None:
        """Sets up the generation, and reports PlanReady or PlanFailed."""
        first, past_last = placement.layers
        log.info(
            "generation %d: layers %d-%d, stage %d of %d (replicas: %d), %d micro-batches a step. %s",
            placement.generation,
            first,
            past_last - 1,
            placement.stage,
            placement.stages,
            len(placement.replicas),
            len(placement.micro_batches),
            assignment.reason,
        )
        try:
            with span(Activity.ADOPT, assignment.step), long_part(f"setting up generation {placement.generation}"):
                needs_data = placement.first or placement.last or loaded.data.sample.isolated
                held = self._data.begin(loaded.data) if needs_data else None
                if held is not None and held.done():
                    held.result()  # without samples, no state is fetched
                generation = set_up(loaded, placement, assignment, inventory, self._earlier, equipment, wait)
                if held is not None:
                    _await_data(held, generation, wait)
        except Closed:
            raise
        except Exception as problem:
            if is_device_lost(problem):
                raise
            self._cannot_adopt(plan_failed(placement.generation, problem))
            return
        itself = loaded.run.checkpoint.uri.startswith(COORDINATOR)  # it keeps no tokens for others
        if placement.first and placement.replicas[0] == placement.node and not itself:
            self._data.publish(loaded.data, loaded.run.checkpoint.uri)
        log.info("compression: %s", generation.codecs)
        deliver_to(generation.receiver)
        self.generation, self._earlier = generation, None
        self._keep_frozen(loaded, placement.layers)
        # Until the generation begins, this node still donates what it held before, and still has it if it never does.
        self._hold(assignment.step, {**generation.stage.buckets, **self._store.held.buckets})
        progress, codecs = generation.progress.report(placement), generation.codecs.report
        ready = wire.PlanReady(generation=generation.number, progress=progress, codecs=codecs)
        self._is_ready(ready, assignment.step, {**inventory.expected, **generation.stage.buckets}.values())

    def _drop_other_history(self, assignment: wire.Assignment, rounds: Rounds) -> None:
        """Drops held state as of another step, or made by another commit of the same step: its memory may be needed. What is left
        is held for a plan with these ``rounds``."""
        last, buckets = assignment.last_commit, self._store.held.buckets
        committed_in = last.generation if last.step == assignment.step else 0
        if (self._store.held.step, self._committed_in) != (assignment.step, committed_in):
            buckets, self._earlier, self._committed_in = {}, None, committed_in
        self._store.replace(HeldState(assignment.step, buckets, rounds))

    def _hold(self, step: int, buckets: Mapping[int, Bucket]) -> None:
        self._store.replace(HeldState(step, buckets, self._store.held.rounds))

    def _take_copies(self, loaded: LoadedRun, assignment: wire.Assignment, wait: Wait) -> Mapping[int, Bucket]:
        """This node's standby copies, if they are as of the assignment's step. Raises Closed."""
        is_known = assignment.last_commit.step == assignment.step
        last = assignment.last_commit if is_known else wire.Commit(step=assignment.step)
        try:
            return wait(self._standing_by.role.take(last, loaded.run.lease_seconds))
        except Closed:
            raise
        except Exception:
            log.exception("the standby's copies cannot be used")
            return {}

    def _keep_frozen(self, loaded: LoadedRun, *layers: tuple[int, int]) -> None:
        """Lets go of frozen weights but those of these layers, and those that it may get."""
        wanted = self._standing_by.wanted
        loaded.model.frozen.keep(*layers, (wanted.first_layer, wanted.past_last_layer))

    def _is_ready(self, ready: wire.PlanReady, step: int, states: Collection[Bucket]) -> None:
        self._digests.begin(step, states)
        ready.states.extend(self._digests.of(states))
        self._report(wire.NodeMessage(plan_ready=ready))

    def _cannot_adopt(self, failed: wire.PlanFailed) -> None:
        log.error("generation %d cannot be adopted: %s", failed.generation, failed.problem)
        self._report(wire.NodeMessage(plan_failed=failed))


def _await_data(held: Future[None], generation: Generation, wait: Wait) -> None:
    """Returns when this node has the samples; if it cannot have them, or is called off, ``generation`` is released."""

    async def have() -> None:
        await asyncio.wrap_future(held)

    try:
        wait(have())
    except Exception as problem:
        generation.close(f"this node does not have the data: {problem}")
        generation.release()
        raise
