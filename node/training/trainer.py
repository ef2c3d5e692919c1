"""The node's training thread: carries out the coordinator's decisions one after the other."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from dtfm.kernels.codec import Codec
from dtfm.node.data.allowed import Allowed
from dtfm.node.data.dataset import Agreed
from dtfm.node.data.holding import Holding
from dtfm.node.data.problems import sentence_of
from dtfm.node.host.device import free_memory
from dtfm.node.host.long_parts import long_part
from dtfm.node.host.trace import Activity, span
from dtfm.node.host.work import WORK
from dtfm.node.model.bucket import HOST, Bucket
from dtfm.node.model.loaded_run import LoadedRun
from dtfm.node.model.placement import Placement, placement_of, read_plan
from dtfm.node.model.precision import compute_dtype
from dtfm.node.network.dialling import Dialler
from dtfm.node.state.digests import StateDigests
from dtfm.node.state.recovery import Inventory, take_inventory
from dtfm.node.state.standby_role import StandbyRole
from dtfm.node.state.state_store import HeldState
from dtfm.node.training.auditing import Auditing
from dtfm.node.training.failure import is_device_lost, may_pass, peer_of, plan_failed, problem_of
from dtfm.node.training.generation import Generation
from dtfm.node.training.generation_setup import Equipment, free_first, set_up
from dtfm.node.training.preparation import Preparation
from dtfm.node.training.writing import Writing
from dtfm.node.transport.receiver import Receiver
from dtfm.node.transport.topic_queue import Closed
from dtfm.protos import control_pb2 as wire
from dtfm.protos.places import COORDINATOR
from dtfm.protos.plan_pb2 import Run
from dtfm.scheduler.model.rounds import Rounds

log = logging.getLogger(__name__)
Result = TypeVar("Result")

STOP_SECONDS = 10.0
"""Most seconds to wait for the thread when the node stops."""

PAUSES = (5.0, 15.0, 45.0, 120.0, 300.0)
"""Seconds between attempts to load the run where what failed may pass."""

FROZEN_EARLY = 0.5
"""The fraction of the host's free memory for frozen weights of layers that this node may get."""

DeliverTo = Callable[[Receiver | None], None]


class Trainer:
    """Public methods are called on the event loop and return at once; their work is done in this node's training thread.

    ``report`` takes a message for the coordinator, ``fail`` why this node cannot take part, which ends it.
    """

    def __init__(
        self,
        equipment: Equipment,
        loop: asyncio.AbstractEventLoop,
        report: Callable[[wire.NodeMessage], None],
        fail: Callable[[Exception], None],
    ) -> None:
        self._equipment = equipment
        self._store = equipment.store
        self._snapshots = equipment.snapshots
        self._loop = loop
        self._report = report
        self._fail = fail
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._standby = StandbyRole(equipment.node, report)
        self._standby_wanted = wire.Standby()
        self._preparation = Preparation(equipment, loop)
        self._auditing = Auditing(equipment.kept, self._store, loop, report)
        self._writing = Writing(equipment.device, report)
        self._generation: Generation | None = None
        self._earlier: Generation | None = None  # the last one, on which the next may build
        self._wanted: Run | None = None  # the one of the last welcome
        self._newest = 0  # the newest generation that the coordinator has announced
        self._adopting = 0
        self._waiting: Future[Any] | None = None  # for work on the event loop
        self._voted: int | None = None  # the step that this node is ready to commit
        self._committed_in = 0  # the generation whose commit made the held state; 0: none did
        self._paused: tuple[int, int] | None = None  # the (generation, step) that was not begun, as of the last pause
        self._digests = StateDigests()
        self._stopping = threading.Event()
        self._data = Holding()
        self._thread = threading.Thread(target=self._run, name="trainer", daemon=True)
        self._thread.start()

    # Called on the event loop

    def prepare(
        self, run: Run, dialler: Dialler, allowed: Allowed, agreed: Agreed | None = None, trained: int = 0
    ) -> None:
        """Loads the run's data, on which its members may have ``agreed``, and its model, and reports Prepared. ``allowed``: what
        the run may name here. ``trained``: the samples that the run has trained on."""
        self._wanted = run
        self._commands.put(lambda: self._prepare(run, dialler, allowed, agreed, trained))

    def adopt(self, assignment: wire.Assignment, deliver_to: DeliverTo) -> None:
        """Calls off the present generation and sets up the assignment's, whose frames go to ``deliver_to``'s receiver."""
        self._newest = assignment.generation
        self.interrupt(f"generation {assignment.generation} replaces this one")
        self._commands.put(lambda: self._adopt(assignment, deliver_to))

    def begin(self, begin: wire.Begin) -> None:
        self._commands.put(lambda: self._begin(begin))

    def conclude(self, commit: wire.Commit) -> None:
        """Applies a committed step, and trains the next one."""
        self._auditing.call_off()
        self._commands.put(lambda: self._conclude(commit))

    def audit(self, audit: wire.Audit) -> None:
        """Repeats another replica's work, of the step that this node has voted on, unless that is over first."""
        came = time.monotonic()
        self._commands.put(lambda: self._audit(audit, came))

    def write_texts(self, wanted: wire.WriteTexts) -> None:
        """Continues prompts with the weights after a step, beside all other work."""
        self._commands.put(lambda: self._write_texts(wanted))

    def links_changed(self, links: wire.LinksChanged) -> None:
        self._commands.put(lambda: self._links_changed(links))

    def arriving(self) -> list[wire.StepReady.Arrived]:
        """The tensors of the current step that have come so far."""
        generation = self._generation
        return generation.receiver.paces_so_far() if generation is not None else []

    def work(self) -> wire.Heartbeat.Work:
        """How much this node has done, and whether it waits for others."""
        done, waits = WORK.so_far
        return wire.Heartbeat.Work(done=done, waits=waits)

    def look_after_timing(self, others: float) -> None:
        """Has the device timed again if that is due and this node is idle, while other programs use this share of its machine."""
        timing = self._preparation.timing
        if (
            timing is not None
            and self.at is None
            and self._commands.empty()
            and timing.is_due(time.monotonic(), others)
        ):
            self._commands.put(self._time_again)

    def test(self) -> None:
        """Shows that this node's device works, once its training thread is free."""
        self._commands.put(self._test)

    def call_off(self, reason: str) -> None:
        """The present step is aborted: nobody applies it."""
        self.interrupt(reason)
        self._commands.put(self._forget_vote)

    def interrupt(self, reason: str) -> None:
        """Calls off what the present generation is doing. A step that is committed is still applied."""
        generation, waiting = self._generation, self._waiting
        if generation is not None:
            generation.close(reason)
        if waiting is not None:
            waiting.cancel()
        self._auditing.call_off()
        self._equipment.sender.interrupt(reason)

    def failed(self, error: Exception, of: int | None = None) -> None:
        """The present step cannot be finished here, so that it is aborted for all; or, without a step, or a device, this node
        cannot take part. From any thread. ``of``: the generation whose stream broke; once that is over, or pauses, so is the
        matter."""
        at = self.at
        if of is not None and (at is None or at[0] != of or at == self._paused):
            return
        if at is None or is_device_lost(error):
            log.debug("this node cannot take part", exc_info=error)
            self._fail(error)
            return
        problem = problem_of(error)
        generation, step = at
        log.error("step %d failed: %s", step, error, exc_info=error if problem == wire.StepProblem.INTERNAL else None)
        failed = wire.StepFailed(
            generation=generation, step=step, problem=problem, peer=peer_of(error), sentence=sentence_of(error)
        )
        self._report(wire.NodeMessage(step_failed=failed))

    @property
    def hardware(self) -> wire.Device:
        """This device, with its speed on the run's layers, if these were timed."""
        device = wire.Device()
        device.CopyFrom(self._equipment.hardware)
        device.flops = self._preparation.flops or device.flops
        return device

    @property
    def at(self) -> tuple[int, int] | None:
        """(generation, step) that this node works on."""
        generation = self._generation
        return (generation.number, self._store.held.step + 1) if generation is not None else None

    async def stand_by(self, wanted: wire.Standby) -> None:
        """Starts standing by for the wanted layers. An empty range stops it."""
        self._standby_wanted = wanted
        if wanted.past_last_layer and (loaded := self._loaded) is not None:
            await self._hold_data(loaded, wanted.first_layer, wanted.past_last_layer)
            await self._hold_frozen(loaded, wanted.first_layer, wanted.past_last_layer)
            if self._standby_wanted is not wanted:
                return  # a later request has come since
        loaded, generation = self._loaded, self._generation
        if wanted.past_last_layer and loaded is not None:
            # The last generation may still be ending here.
            is_current = generation is not None and generation.number == self._newest
            trained = generation.stage.buckets if generation is not None and is_current else ()
            await self._standby.assume(loaded, wanted, trained)
        else:
            await self._standby.end()

    async def _hold_data(self, loaded: LoadedRun, first: int, past_last: int) -> None:
        """Before this node gets these layers: it has the samples, if it will need them, while nobody waits for it."""
        if first == 0 or past_last == len(loaded.model.layers) or loaded.data.sample.isolated:
            try:
                await asyncio.wrap_future(self._data.begin(loaded.data))
            except Exception as problem:  # whatever the file system raises comes again when the plan is adopted
                log.error("%s", problem)

    async def _hold_frozen(self, loaded: LoadedRun, first: int, past_last: int) -> None:
        """Before this node gets these layers: it has their frozen weights in the host's memory, as far as there is room."""
        frozen, dtype = loaded.model.frozen, compute_dtype(loaded.run)
        try:
            await asyncio.to_thread(frozen.load, first, past_last, dtype, int(FROZEN_EARLY * free_memory(HOST)))
        except Exception as problem:  # it is read again when the plan is adopted
            log.error("%s", problem)

    def stop(self) -> None:
        """Calls off the present work and ends the threads."""
        self.interrupt("the node is stopping")
        self._stopping.set()
        self._preparation.cancel()
        if self._loaded is not None:
            self._loaded.model.frozen.close()
        self._commands.put(None)
        self._thread.join(timeout=STOP_SECONDS)
        self._writing.close(STOP_SECONDS)
        self._digests.close()

    # In the training thread

    def _run(self) -> None:
        while (command := self._commands.get()) is not None:
            try:
                with WORK.working():
                    command()
            except Closed as closed:
                log.info("called off: %s", closed)
            except Exception as error:
                self.failed(error)

    def _await(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs ``work`` on the event loop. Raises Closed when called off."""
        self._waiting = waiting = asyncio.run_coroutine_threadsafe(work, self._loop)
        if self._adopting < self._newest:  # a newer plan came before there was anything to cancel
            waiting.cancel()
        try:
            with WORK.waiting():
                return waiting.result()
        except CancelledError:
            raise Closed("the wait for peers was called off") from None
        finally:
            self._waiting = None

    @property
    def _loaded(self) -> LoadedRun | None:
        return self._preparation.loaded

    def _prepare(self, run: Run, dialler: Dialler, allowed: Allowed, agreed: Agreed | None, trained: int) -> None:
        try:
            if self._load(run, dialler, allowed, agreed):
                self._store.replace(HeldState())
                self._voted, self._committed_in = None, 0
            assert self._loaded is not None
            self._loaded.data.reach(trained)  # nobody is to wait for it in a step
            # Else the node has been welcomed again since, perhaps to a run that has changed.
            if run is self._wanted:
                self._report(wire.NodeMessage(prepared=self._preparation.message()))
        except (ValueError, OSError) as error:
            # Also during a step: the coordinator waits for this node to be prepared.
            self._fail(error)

    def _load(self, run: Run, dialler: Dialler, allowed: Allowed, agreed: Agreed | None) -> bool:
        """As Preparation.load. Trouble that may pass, as of the hub, is waited for."""
        for pause in PAUSES:
            try:
                return self._preparation.load(run, dialler, allowed, agreed)
            except Exception as error:
                if not may_pass(error):
                    raise
                log.warning("%s; trying again in %.0f s", sentence_of(error), pause)
                if self._stopping.wait(pause):
                    raise Closed("the node is stopping") from None
        return self._preparation.load(run, dialler, allowed, agreed)

    def _time_again(self) -> None:
        if self.at is None and self._commands.empty() and (timed := self._preparation.time_again()) is not None:
            log.info("the device was timed again: %.0f GFLOP/s", timed.flops / 1e9)
            self._report(wire.NodeMessage(timed=timed))

    def _test(self) -> None:
        try:
            timed = self._preparation.compute_a_sample()
        except Exception as error:
            if is_device_lost(error):
                raise
            log.error("this node's device has failed its test: %s", error)  # the coordinator tries it again
            return
        log.info("this node has failed before; its device passes the test, with %.0f GFLOP/s", timed.flops / 1e9)
        self._report(wire.NodeMessage(timed=timed))

    # Adopting a plan

    def _adopt(self, assignment: wire.Assignment, deliver_to: DeliverTo) -> None:
        assert self._loaded is not None
        number, train = assignment.generation, self._loaded.run.train
        self._adopting = number
        self._writing.call_off()  # its memory may be needed
        self._end_generation(assignment.last_commit)
        if number < self._newest:
            log.info("skipped generation %d: %d is here", number, self._newest)
            return
        held_out = train.evaluation_samples // train.micro_batch
        buckets = self._loaded.model.buckets
        try:
            layers, micro_batches = len(self._loaded.model.layers), train.global_batch // train.micro_batch
            plan = read_plan(assignment.plan, layers, micro_batches, assignment.step)
        except ValueError as error:
            self._cannot_adopt(plan_failed(number, error))
            return
        self._drop_other_history(assignment, plan.rounds)
        placement = placement_of(
            plan,
            self._equipment.node,
            held_out,
            buckets,
            twice=self._loaded.run.trust.mode == Run.Trust.OPEN,
            trained_before=assignment.trained_before,
            is_new=0 < assignment.island_began == assignment.step,
        )
        try:
            if placement is not None and placement.frees_first:
                free_first(self._loaded, placement, assignment, self._earlier, self._equipment)
        except OSError as error:
            self._cannot_adopt(plan_failed(number, error))
            return
        inventory = take_inventory(assignment, buckets, self._equipment.node, placement, self._store.held)
        begins = placement is not None and placement.is_new  # it needs only the state that islands share
        if inventory.is_incomplete and (begins or self._standby.is_of_all):  # copies of less are for others
            inventory = replace(inventory, copied=self._take_copies(assignment))
            self._hold(assignment.step, {**inventory.held, **inventory.copied})
        if lost := inventory.lost:
            problem = f"this node does not have the state of layers {lost} as of step {assignment.step}, as expected"
            self._cannot_adopt(wire.PlanFailed(generation=number, problem=problem, lost=lost))
        elif placement is None:
            log.info("idle in generation %d: %s", number, assignment.reason)
            self._earlier = None
            self._keep_frozen()
            if inventory.expected:  # it vouches for the state that others may get from it
                self._is_ready(wire.PlanReady(generation=number), assignment.step, inventory.expected.values())
            self._data.begin_early(self._loaded.data)  # should another node be lost, nobody is to wait for it
            deliver_to(None)
        else:
            self._enter(placement, assignment, inventory, deliver_to)

    def _end_generation(self, last_commit: wire.Commit) -> None:
        generation = self._generation
        if generation is not None:
            if (generation.number, self._voted) == (last_commit.generation, last_commit.step):
                # The connection broke, or the coordinator died, before this node heard of the commit.
                log.info("step %d was committed meanwhile", last_commit.step)
                self._apply(generation, last_commit)
            generation.release()
            self._earlier = generation
        self._generation = None
        self._forget_vote()

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

    def _take_copies(self, assignment: wire.Assignment) -> Mapping[int, Bucket]:
        """This node's standby copies, if they are as of the assignment's step. Raises Closed."""
        assert self._loaded is not None
        is_known = assignment.last_commit.step == assignment.step
        last = assignment.last_commit if is_known else wire.Commit(step=assignment.step)
        try:
            return self._await(self._standby.take(last, self._loaded.run.lease_seconds))
        except Closed:
            raise
        except Exception:
            log.exception("the standby's copies cannot be used")
            return {}

    def _enter(
        self, placement: Placement, assignment: wire.Assignment, inventory: Inventory, deliver_to: DeliverTo
    ) -> None:
        """Sets up the generation, and reports PlanReady or PlanFailed."""
        assert self._loaded is not None
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
        equipment = replace(self._equipment, hardware=self.hardware)
        try:
            with span(Activity.ADOPT, assignment.step), long_part(f"setting up generation {placement.generation}"):
                needs_data = placement.first or placement.last or self._loaded.data.sample.isolated
                held = self._data.begin(self._loaded.data) if needs_data else None
                if held is not None and held.done():
                    held.result()  # without samples, no state is fetched
                generation = set_up(
                    self._loaded, placement, assignment, inventory, self._earlier, equipment, self._await
                )
                if held is not None:
                    self._await_data(held, generation)
        except Closed:
            raise
        except Exception as problem:
            if is_device_lost(problem):
                raise
            self._cannot_adopt(plan_failed(placement.generation, problem))
            return
        itself = self._loaded.run.checkpoint.uri.startswith(COORDINATOR)  # it keeps no tokens for others
        if placement.first and placement.replicas[0] == placement.node and not itself:
            self._data.publish(self._loaded.data, self._loaded.run.checkpoint.uri)
        log.info("compression: %s", generation.codecs)
        deliver_to(generation.receiver)
        self._generation, self._earlier = generation, None
        self._keep_frozen(placement.layers)
        # Until the generation begins, this node still donates what it held before, and still has it if it never does.
        self._hold(assignment.step, {**generation.stage.buckets, **self._store.held.buckets})
        progress, codecs = generation.progress.report(placement), generation.codecs.report
        ready = wire.PlanReady(generation=generation.number, progress=progress, codecs=codecs)
        self._is_ready(ready, assignment.step, {**inventory.expected, **generation.stage.buckets}.values())

    def _keep_frozen(self, *layers: tuple[int, int]) -> None:
        """Lets go of frozen weights but those of these layers, and those that it may get."""
        assert self._loaded is not None
        wanted = self._standby_wanted
        self._loaded.model.frozen.keep(*layers, (wanted.first_layer, wanted.past_last_layer))

    def _is_ready(self, ready: wire.PlanReady, step: int, states: Collection[Bucket]) -> None:
        self._digests.begin(step, states)
        ready.states.extend(self._digests.of(states))
        self._report(wire.NodeMessage(plan_ready=ready))

    def _cannot_adopt(self, failed: wire.PlanFailed) -> None:
        log.error("generation %d cannot be adopted: %s", failed.generation, failed.problem)
        self._report(wire.NodeMessage(plan_failed=failed))

    def _await_data(self, held: Future[None], generation: Generation) -> None:
        """Returns when this node has the samples; if it cannot have them, or is called off, ``generation`` is released."""

        async def have() -> None:
            await asyncio.wrap_future(held)

        try:
            self._await(have())
        except Exception as problem:
            generation.close(f"this node does not have the data: {problem}")
            generation.release()
            raise

    # Training

    def _begin(self, begin: wire.Begin) -> None:
        generation = self._generation
        if generation is None or generation.number != begin.generation:
            log.info("ignored the start of generation %d, which this node does not have", begin.generation)
            return
        assert begin.step == self._store.held.step + 1, (begin.step, self._store.held.step)
        generation.neighbours_have(begin.activations, begin.gradients)
        for bucket in generation.stage.buckets.values():
            bucket.donors = ()  # others have the same
        self._hold(begin.step - 1, generation.stage.buckets)
        self._train(generation)

    def _train(self, generation: Generation, by_bucket: bool = False) -> None:
        """Computes the next step and votes on it. ``by_bucket``: the vote also has the digest of each bucket."""
        step = self._store.held.step + 1
        self._store.retract()
        exchanges = generation.placement.rounds.exchanges(step)
        outcome, squared_norm = generation.exchange(step) if exchanges else generation.train(step)
        self._store.vote(generation.number, generation.codecs.exchange if exchanges else Codec.OFF)
        self._voted = step
        log.debug(
            "step %d: %.2f s computing, %.2f s waiting for peers", step, outcome.compute_seconds, outcome.wait_seconds
        )
        with span(Activity.VOTE, step):
            ready = generation.vote(step, outcome, squared_norm, self._digests.of_stage(generation.stage.buckets))
            if by_bucket:
                ready.states.extend(self._digests.of(generation.stage.buckets.values()))
            self._auditing.begin(generation, step)
            self._report(wire.NodeMessage(step_ready=ready))

    def _conclude(self, commit: wire.Commit) -> None:
        """Applies a committed step, does what the coordinator wants done before the next one, then trains that."""
        generation = self._generation
        if generation is None or generation.number != commit.generation:
            log.error("step %d was committed in a generation that this node does not have; ignored", commit.step)
            return
        if self._voted == commit.step:
            self._apply(generation, commit)
        elif self._store.held.step != commit.step:
            log.error("step %d was committed without this node's vote; ignored", commit.step)
            return
        if commit.snapshot and generation.placement.is_main:
            self._snapshots.writer.write(commit.step, generation.stage.buckets.values(), self._store.images)
        if commit.pause:
            buckets = generation.stage.buckets
            digest, states = self._digests.of_stage(buckets), self._digests.of(buckets.values())
            applied = wire.Applied(generation=commit.generation, step=commit.step, state_digest=digest, states=states)
            self._report(wire.NodeMessage(applied=applied))
        if commit.evaluate:
            with span(Activity.EVALUATE, commit.step):
                losses = generation.evaluate(commit.step)
            if losses:  # by the last stage's nodes that have held-out micro-batches
                evaluated = wire.Evaluated(generation=commit.generation, step=commit.step, losses=losses)
                self._report(wire.NodeMessage(evaluated=evaluated))
        if commit.pause:
            self._paused = self.at
        else:
            self._train(generation, by_bucket=commit.snapshot or generation.placement.rounds.exchanges(commit.step))

    def _write_texts(self, wanted: wire.WriteTexts) -> None:
        """This node has voted on the step after that by now, or trains nothing: nobody waits for it. The weights are still those
        of the step."""
        generation, copies, loaded = self._generation, self._standby.copies, self._loaded
        if loaded is None:
            return
        count, step = len(loaded.model.buckets), wanted.step
        weights = generation.stage.weights if generation is not None and self._store.held.step == step else {}
        has_copies = copies is not None and len(copies) == count
        if len(weights) < count and not has_copies:
            log.info("no texts after step %d: this node does not have all weights after it", step)
            return
        take = copies.parameters if copies is not None else lambda *_: None
        self._writing.begin(loaded, step, wanted.prompts, weights if len(weights) == count else {}, take)

    def _apply(self, generation: Generation, commit: wire.Commit) -> None:
        self._voted = None  # if applying fails half-way, it must not be done again
        self._committed_in = commit.generation
        with span(Activity.APPLY, commit.step):
            self._store.apply(commit, partial(generation.apply, commit))
        self._digests.begin(commit.step, generation.stage.buckets.values())  # the next step's vote waits for them

    def _links_changed(self, changed: wire.LinksChanged) -> None:
        """After a step, or before the first one."""
        generation, node = self._generation, self._equipment.node
        bandwidth = {k.destination: k.bandwidth for k in changed.links if k.source == node and k.bandwidth}
        if generation is not None and generation.links_changed(bandwidth):
            log.info("compression from now on: %s", generation.codecs)
            chosen = wire.CodecsChosen(generation=generation.number, codecs=generation.codecs.report)
            self._report(wire.NodeMessage(codecs_chosen=chosen))

    def _audit(self, audit: wire.Audit, came: float) -> None:
        assert self._loaded is not None
        self._auditing.carry_out(audit, came, self._generation, self._voted, self._loaded.dialler)

    def _forget_vote(self) -> None:
        self._voted = None
        self._auditing.call_off()
