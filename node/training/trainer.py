"""The node's training thread: carries out the coordinator's decisions one after the other."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from typing import Any, TypeVar

from dtfm.kernels.codec import Codec
from dtfm.node.data.allowed import Allowed
from dtfm.node.data.dataset import Agreed
from dtfm.node.data.holding import Holding
from dtfm.node.host.trace import Activity, span
from dtfm.node.host.work import WORK
from dtfm.node.model.loaded_run import LoadedRun
from dtfm.node.network.dialling import Dialler
from dtfm.node.state.digests import StateDigests
from dtfm.node.training.adoption import Adoption, DeliverTo
from dtfm.node.training.audits.auditing import Auditing
from dtfm.node.training.equipment import Equipment
from dtfm.node.training.failure import is_device_lost, step_failed
from dtfm.node.training.generation import Generation
from dtfm.node.training.preparing.preparation import Preparation
from dtfm.node.training.standing_by import StandingBy
from dtfm.node.training.writing import Writing
from dtfm.node.transport.receiver import Closed
from dtfm.protos import control_pb2 as wire
from dtfm.protos.outer import MOST_OUTER_STEPS, OuterStep
from dtfm.protos.plan_pb2 import Run

log = logging.getLogger(__name__)
Result = TypeVar("Result")

STOP_SECONDS = 10.0
"""Most seconds to wait for the thread when the node stops."""


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
        self._data = Holding()
        self._digests = StateDigests()
        self._standing_by = StandingBy(equipment.node, self._data, report)
        self._adoption = Adoption(equipment, self._standing_by, self._data, self._digests, report)
        self._preparation = Preparation(equipment, loop)
        self._auditing = Auditing(equipment.kept, self._store, loop, report)
        self._writing = Writing(equipment.device, report)
        self._wanted: Run | None = None  # the one of the last welcome
        self._newest = 0  # the newest generation that the coordinator has announced
        self._adopting = 0
        self._waiting: Future[Any] | None = None  # for work on the event loop
        self._voted: int | None = None  # the step that this node is ready to commit
        self._paused: tuple[int, int] | None = None  # the (generation, step) that was not begun, as of the last pause
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
        failed = step_failed(*at, error)
        log.error("step %d failed: %s", failed.step, error, exc_info=error if failed.problem == wire.INTERNAL else None)
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
        await self._standing_by.stand_by(wanted, lambda: self._loaded, self._trained)

    def _trained(self) -> Collection[int]:
        """The buckets that this node trains under the newest plan. The generation before it may still be ending here."""
        generation = self._generation
        return generation.stage.buckets if generation is not None and generation.number == self._newest else ()

    def stop(self) -> None:
        """Calls off the present work and ends the threads."""
        self.interrupt("the node is stopping")
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

    @property
    def _generation(self) -> Generation | None:
        return self._adoption.generation

    def _prepare(self, run: Run, dialler: Dialler, allowed: Allowed, agreed: Agreed | None, trained: int) -> None:
        try:
            if self._preparation.load_when_it_can_be(run, dialler, allowed, agreed):
                self._adoption.forget()
                self._voted = None
            assert self._loaded is not None
            self._loaded.data.reach(trained)  # nobody is to wait for it in a step
            # Else the node has been welcomed again since, perhaps to a run that has changed.
            if run is self._wanted:
                self._report(wire.NodeMessage(prepared=self._preparation.message()))
        except (ValueError, OSError) as error:
            # Also during a step: the coordinator waits for this node to be prepared.
            self._fail(error)

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

    def _adopt(self, assignment: wire.Assignment, deliver_to: DeliverTo) -> None:
        assert self._loaded is not None
        self._adopting = assignment.generation
        self._writing.call_off()  # its memory may be needed
        self._end_generation(assignment.last_commit)
        if assignment.generation < self._newest:
            log.info("skipped generation %d: %d is here", assignment.generation, self._newest)
            return
        equipment = replace(self._equipment, hardware=self.hardware)
        self._adoption.adopt(self._loaded, equipment, assignment, deliver_to, self._await)

    def _end_generation(self, last_commit: wire.Commit) -> None:
        generation = self._generation
        if generation is not None and (generation.number, self._voted) == (last_commit.generation, last_commit.step):
            # The connection broke, or the coordinator died, before this node heard of the commit.
            log.info("step %d was committed meanwhile", last_commit.step)
            self._apply(last_commit)
        self._adoption.end()
        self._forget_vote()

    # Training

    def _begin(self, begin: wire.Begin) -> None:
        generation = self._generation
        if generation is None or generation.number != begin.generation:
            log.info("ignored the start of generation %d, which this node does not have", begin.generation)
            return
        self._adoption.begin(begin)
        self._train(generation, begin.look_at)

    def _train(self, generation: Generation, look_at: Sequence[wire.OuterStep], by_bucket: bool = False) -> None:
        """Computes the next step and votes on it. ``look_at``: the outer steps that the exchange tries first. ``by_bucket``: the
        vote also has the digest of each bucket."""
        step = self._store.held.step + 1
        self._store.retract()
        exchanges = generation.placement.rounds.exchanges(step)
        outcome, squared_norm = generation.exchange(step) if exchanges else generation.train(step)
        if exchanges and look_at:
            with span(Activity.EVALUATE, step), self._store.set_aside({}):
                tried = [OuterStep(each.rate, each.momentum) for each in look_at[:MOST_OUTER_STEPS]]
                outcome = generation.look(step, tried, outcome)
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
            self._apply(commit)
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
            by_bucket = commit.snapshot or generation.placement.rounds.exchanges(commit.step)
            self._train(generation, commit.look_at, by_bucket)

    def _write_texts(self, wanted: wire.WriteTexts) -> None:
        """This node has voted on the step after that by now, or trains nothing: nobody waits for it. The weights are still those
        of the step."""
        generation, copies, loaded = self._generation, self._standing_by.role.copies, self._loaded
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

    def _apply(self, commit: wire.Commit) -> None:
        self._voted = None  # if applying fails half-way, it must not be done again
        self._adoption.apply(commit)

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
