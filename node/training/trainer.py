"""The node's thread of work: takes the coordinator's decisions one after the other and carries them out."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from dtfm.node.data.dataset import load_data
from dtfm.node.host.trace import Activity, span
from dtfm.node.model.bucket import Bucket
from dtfm.node.model.load import load_model
from dtfm.node.model.workload import layer_flops, workload
from dtfm.node.state.checkpoint_writer import CheckpointWriter, part_of
from dtfm.node.state.prefetch import Copier
from dtfm.node.state.snapshot import Keeper
from dtfm.node.state.state_store import Held, Holding
from dtfm.node.training.failure import plan_failed, problem_of, sentence_of
from dtfm.node.training.generation import Engagement
from dtfm.node.training.generation_setup import Work, engage, lacks_state, lost_state
from dtfm.node.training.pipeline import Outcome
from dtfm.node.model.placement import share_of
from dtfm.node.transport.receiver import Inbox
from dtfm.node.transport.sender import Outbox
from dtfm.node.transport.topic_queue import Closed
from dtfm.protos.control_pb2 import (
    Applied,
    Assignment,
    Begin,
    CodecsChosen,
    Commit,
    Device,
    Evaluated,
    Heartbeat,
    LinksChanged,
    NodeMessage,
    PlanReady,
    Prefetch,
    Prepared,
    StepFailed,
    StepProblem,
    StepReady,
)
from dtfm.protos.credentials import Identity
from dtfm.protos.plan_pb2 import Run

log = logging.getLogger(__name__)
Result = TypeVar("Result")

NARRATE_SECONDS = 10.0
"""At most so often a node's operator reads how a step went."""


class Trainer:
    """Public methods are called on the event loop and return at once; what they ask for happens in this node's thread.

    ``report`` takes a message for the coordinator, ``fail`` a sentence about a mistake of the user's that ends the node.
    ``hardware`` is what measure_device says.
    """

    def __init__(
        self,
        node: str,
        device: torch.device,
        hardware: Device,
        allowed_modules: tuple[str, ...],
        outbox: Outbox,
        holding: Holding,
        keeper: Keeper,
        loop: asyncio.AbstractEventLoop,
        report: Callable[[NodeMessage], None],
        fail: Callable[[str], None],
    ) -> None:
        self._node = node
        self._device = device
        self._hardware = hardware
        self._layer_flops: float | None = None
        self._allowed_modules = allowed_modules
        self._outbox = outbox
        self._loop = loop
        self._report = report
        self._fail = fail
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._work: Work | None = None
        self._holding = holding
        self._keeper = keeper
        self._copier = Copier(node, device, report)
        self._engagement: Engagement | None = None
        self._earlier: Engagement | None = None  # what the next one may build on
        self._newest = 0  # generation
        self._adopting = 0
        self._waiting: Future[Any] | None = None  # for the event loop
        self._voted: int | None = None  # the step that this node is ready to commit
        self._made_by = 0  # the generation of the commit that made what is held; 0: none did
        self._digest: Future[bytes] | None = None
        self._said = 0.0  # when a step was last told of
        self._background = ThreadPoolExecutor(1, "digest")
        self._writer = CheckpointWriter(report)
        self._thread = threading.Thread(target=self._run, name="trainer", daemon=True)
        self._thread.start()

    # Called on the event loop

    def prepare(self, run: Run, identity: Identity) -> None:
        self._commands.put(lambda: self._prepare(run, identity))

    def adopt(self, assignment: Assignment, admit_to: Callable[[Inbox | None], None]) -> None:
        self._newest = assignment.plan.generation
        self.interrupt(f"generation {assignment.plan.generation} replaces this one")
        self._commands.put(lambda: self._adopt(assignment, admit_to))

    def begin(self, begin: Begin) -> None:
        self._commands.put(lambda: self._begin(begin))

    def conclude(self, commit: Commit) -> None:
        self._commands.put(lambda: self._conclude(commit))

    def links_changed(self, links: LinksChanged) -> None:
        self._commands.put(lambda: self._links_changed(links))

    def call_off(self, reason: str) -> None:
        """The step in hand is aborted: nobody applies it."""
        self.interrupt(reason)
        self._commands.put(self._forget_vote)

    def interrupt(self, reason: str) -> None:
        """Calls off what the current generation is doing. A committed step is applied all the same."""
        engagement, waiting = self._engagement, self._waiting
        if engagement is not None:
            engagement.close(reason)
        if waiting is not None:
            waiting.cancel()
        self._outbox.interrupt(reason)

    def time_again(self) -> None:
        """Reports how fast the run's layers are computed now, unless this node has a part in training them."""
        self._commands.put(self._time_again)

    @property
    def hardware(self) -> Device:
        """This device, as fast as it computes the run's layers where these were timed."""
        device = Device()
        device.CopyFrom(self._hardware)
        device.flops = self._layer_flops or device.flops
        return device

    @property
    def at(self) -> tuple[int, int] | None:
        """(generation, step) that this node works on."""
        engagement = self._engagement
        return (engagement.share.generation, self._holding.held.step + 1) if engagement is not None else None

    async def prefetch(self, wanted: Prefetch) -> None:
        """Copies what is wanted while training goes on; no layers: nothing more."""
        work, engagement = self._work, self._engagement
        if wanted.past_last_layer and work is not None:
            # The last engagement may still be coming to its end here.
            current = engagement is not None and engagement.share.generation == self._newest
            trained = engagement.stage.buckets if engagement is not None and current else ()
            await self._copier.copy(work.run, work.model, work.identity, wanted, trained)
        else:
            await self._copier.stop()

    def stop(self) -> None:
        """Ends the thread once what it is doing is called off, and waits for checkpoints being written."""
        self.interrupt("the node is stopping")
        self._commands.put(None)
        self._thread.join(timeout=10)
        self._background.shutdown()
        self._writer.close()

    # In this node's thread

    def _run(self) -> None:
        while (command := self._commands.get()) is not None:
            try:
                command()
            except Closed as closed:
                log.info("called off: %s", closed)
            except Exception as error:
                self._report_failure(error)

    def _report_failure(self, error: Exception) -> None:
        """The step in hand cannot be finished here, and is called off for all; or, before there is one, this node cannot take
        part."""
        at = self.at
        if at is None:
            log.debug("this node cannot take part", exc_info=error)
            self._fail(sentence_of(error))
            return
        problem = problem_of(error)
        generation, step = at
        log.error("step %d failed: %s", step, error, exc_info=error if problem == StepProblem.INTERNAL else None)
        failed = StepFailed(generation=generation, step=step, problem=problem, sentence=sentence_of(error))
        self._report(NodeMessage(step_failed=failed))

    def _await(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs ``work`` on the event loop. Raises Closed when that is called off."""
        self._waiting = waiting = asyncio.run_coroutine_threadsafe(work, self._loop)
        if self._adopting < self._newest:  # that one came before there was anything to call off
            waiting.cancel()
        try:
            return waiting.result()
        except CancelledError:
            raise Closed("the wait for peers was called off") from None
        finally:
            self._waiting = None

    def _prepare(self, run: Run, identity: Identity) -> None:
        if self._work is not None and self._work.run.id == run.id:
            # A resumed run may differ in what does not change what is learned.
            self._work = replace(self._work, run=run, identity=identity)
        else:
            log.info("run %r: reading its data (%s) and its model (%s)", run.name, run.data.source, run.model.family)
            data = load_data(run, self._allowed_modules)
            model = load_model(run.model, data.sample, self._allowed_modules)
            self._work = Work(run, model, data, identity)
            self._layer_flops = layer_flops(model, run, self._device, self._hardware)
            self._holding.replace(Held(0, {}))
            self._voted, self._made_by = None, 0
        work = self._work
        prepared = Prepared(
            workload=workload(work.model, run),
            data_fingerprint=work.data.fingerprint,
            training_samples=work.data.training_count,
            evaluation_samples=work.data.evaluation_count,
            unigram_entropy=work.data.unigram_entropy,
            tokens_per_sample=work.data.tokens_per_sample,
            buckets=len(work.model.buckets),
            kept=self._keeper.open(run, work.model.buckets, identity),
            flops=self._layer_flops or 0.0,
        )
        self._report(NodeMessage(prepared=prepared))

    def _time_again(self) -> None:
        work = self._work
        if work is None or self._engagement is not None or self._adopting < self._newest:
            return
        flops = layer_flops(work.model, work.run, self._device, self._hardware)
        if flops is not None:
            self._report(NodeMessage(heartbeat=Heartbeat(flops=flops)))

    def _adopt(self, assignment: Assignment, admit_to: Callable[[Inbox | None], None]) -> None:
        plan = assignment.plan
        self._adopting = plan.generation
        assert self._work is not None
        train = self._work.run.train
        if self._engagement is not None:
            self._catch_up(self._engagement, assignment.last_commit)
            self._engagement.release()
            self._earlier = self._engagement
        self._engagement, self._voted = None, None
        if plan.generation < self._newest:
            log.info("passed over generation %d: %d is here", plan.generation, self._newest)
            return
        last = assignment.last_commit
        made_by = last.generation if last.step == assignment.step else 0
        if (self._holding.held.step, self._made_by) != (assignment.step, made_by):
            self._holding.replace(Held(assignment.step, {}))  # of another past: its memory may be needed
            self._earlier, self._made_by = None, made_by
        share = share_of(plan, self._node, train.evaluation_samples // train.micro_batch)
        copied: Mapping[int, Bucket] = {}
        if lacks_state(self._work.model, self._holding.held, assignment, self._node, share):
            copied = self._take_copies(assignment, self._work.run.lease_seconds)
            self._holding.replace(Held(assignment.step, {**self._holding.held.buckets, **copied}))
        if (lost := lost_state(self._work.model, self._holding.held, assignment, self._node)) is not None:
            log.error("generation %d: %s", plan.generation, lost.problem)
            self._report(NodeMessage(plan_failed=lost))
            return
        if share is None:
            log.info("idle in generation %d: %s", plan.generation, assignment.reason)
            self._earlier = None
            admit_to(None)
            return
        log.info(
            "generation %d: layers %d-%d, stage %d of %d with %d replicas, %d micro-batches a step. %s",
            plan.generation,
            share.layers[0],
            share.layers[1] - 1,
            share.stage,
            share.stages,
            len(share.replicas),
            len(share.micro_batches),
            assignment.reason,
        )
        try:
            with span(Activity.ADOPT, assignment.step):
                engagement = engage(
                    self._work,
                    share,
                    assignment,
                    self._device,
                    self.hardware,
                    self._holding.held,
                    copied,
                    self._keeper,
                    self._earlier,
                    self._outbox,
                    self._await,
                )
        except Closed:
            raise
        except Exception as problem:
            log.error("generation %d could not be adopted: %s", plan.generation, problem)
            self._report(NodeMessage(plan_failed=plan_failed(plan.generation, problem)))
            return
        log.info("compression: %s", engagement.codecs.sentence)
        admit_to(engagement.inbox)
        self._engagement, self._earlier = engagement, None
        # Until the generation begins this node still donates what it held before.
        self._holding.replace(Held(assignment.step, {**self._holding.held.buckets, **engagement.stage.buckets}))
        self._digest = self._background.submit(engagement.stage.digest)
        ready = PlanReady(
            generation=plan.generation, progress=engagement.progress.told(share), codecs=engagement.codecs.told
        )
        self._report(NodeMessage(plan_ready=ready))

    def _take_copies(self, assignment: Assignment, patience: float) -> Mapping[int, Bucket]:
        """What was copied in advance and is as of the assignment's step. Raises Closed."""
        known = assignment.last_commit.step == assignment.step
        last = assignment.last_commit if known else Commit(step=assignment.step)
        try:
            return self._await(self._copier.take(last, patience))
        except Closed:
            raise
        except Exception:
            log.exception("what was copied in advance is of no use")
            return {}

    def _begin(self, begin: Begin) -> None:
        engagement = self._engagement
        if engagement is None or engagement.share.generation != begin.generation:
            log.info("ignored the start of generation %d, which this node does not have", begin.generation)
            return
        assert begin.step == self._holding.held.step + 1, (begin.step, self._holding.held.step)
        engagement.neighbours_have(begin.activations, begin.gradients)
        self._holding.replace(Held(begin.step - 1, engagement.stage.buckets))
        self._train(engagement)

    def _train(self, engagement: Engagement) -> None:
        """Computes the next step and votes on it."""
        step = self._holding.held.step + 1
        self._holding.retract()
        outcome, squared_norm = engagement.train(step)
        self._holding.vote(engagement.share.generation)
        assert self._digest is not None
        self._voted = step
        self._narrate(step, outcome)
        with span(Activity.VOTE, step):
            ready = StepReady(
                generation=engagement.share.generation,
                step=step,
                squared_gradient_norm=squared_norm,
                loss_sum=outcome.loss_sum,
                samples=outcome.samples,
                state_digest=self._digest.result(),
                compute_seconds=outcome.compute_seconds,
                wait_seconds=outcome.wait_seconds,
                arrived=[
                    StepReady.Arrived(source=source, bytes=size, seconds=seconds)
                    for source, (size, seconds) in sorted(engagement.inbox.take_paces().items())
                ],
            )
            self._report(NodeMessage(step_ready=ready))

    def _narrate(self, step: int, outcome: Outcome) -> None:
        if time.monotonic() - self._said > NARRATE_SECONDS:
            self._said = time.monotonic()
            log.info(
                "step %d: %.2f s computing, %.2f s waiting for peers",
                step,
                outcome.compute_seconds,
                outcome.wait_seconds,
            )

    def _conclude(self, commit: Commit) -> None:
        """Applies a committed step, then what the coordinator wants done before the next one, then that one."""
        engagement = self._engagement
        if engagement is None or engagement.share.generation != commit.generation:
            log.error("step %d was committed without this node's part in it; ignored", commit.step)
            return
        if self._voted == commit.step:
            self._apply(engagement, commit)
        elif self._holding.held.step != commit.step:
            log.error("step %d was committed without this node's vote; ignored", commit.step)
            return
        if commit.checkpoint:
            work = self._work
            assert work is not None
            mine = part_of(self._node, engagement.stage.buckets, engagement.groups)
            self._writer.write(work.run, work.model, work.data, commit.step, mine)
        if commit.backup:
            self._keeper.write(commit.step, engagement.stage.buckets.values())
        if commit.pause:
            assert self._digest is not None
            applied = Applied(generation=commit.generation, step=commit.step, state_digest=self._digest.result())
            self._report(NodeMessage(applied=applied))
        if commit.evaluate:
            with span(Activity.EVALUATE, commit.step):
                loss_sum, samples = engagement.evaluate(commit.step)
            evaluated = Evaluated(generation=commit.generation, step=commit.step, loss_sum=loss_sum, samples=samples)
            if engagement.share.last:
                self._report(NodeMessage(evaluated=evaluated))
        if not commit.pause:
            self._train(engagement)

    def _links_changed(self, changed: LinksChanged) -> None:
        """After a step, or before the first one."""
        engagement = self._engagement
        bandwidth = {k.destination: k.bandwidth for k in changed.links if k.source == self._node and k.bandwidth}
        if engagement is not None and engagement.links_changed(bandwidth):
            log.info("compression from now on: %s", engagement.codecs.sentence)
            chosen = CodecsChosen(generation=engagement.share.generation, codecs=engagement.codecs.told)
            self._report(NodeMessage(codecs_chosen=chosen))

    def _catch_up(self, engagement: Engagement, commit: Commit) -> None:
        """Applies a step that this node voted for and whose commit it has not heard: the connection broke, or the coordinator
        died, just then."""
        if (engagement.share.generation, self._voted) == (commit.generation, commit.step):
            log.info("step %d was committed meanwhile", commit.step)
            self._apply(engagement, commit)

    def _apply(self, engagement: Engagement, commit: Commit) -> None:
        self._voted = None  # should applying fail half-way, it must not be done again
        self._made_by = commit.generation
        self._writer.state_changes()
        self._keeper.state_changes()
        with span(Activity.APPLY, commit.step):
            update = partial(engagement.apply, commit.step, commit.gradient_norm)
            self._holding.apply(commit.step, commit.gradient_norm, update)
        self._digest = self._background.submit(engagement.stage.digest)

    def _forget_vote(self) -> None:
        self._voted = None
