"""This node's part in one generation: its stage, its groups, and the steps it trains with them."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from dtfm.kernels.codec import Codec, Encoded, codec_named, encoded_bytes
from dtfm.kernels.memory import give_back
from dtfm.node.host.cuda_streams import after
from dtfm.node.host.work import WORK
from dtfm.node.model.loaded_run import LoadedRun
from dtfm.node.model.optimizer.optimizer import change_since_exchange, inner_step, outer_step, squared_norms, terms_of
from dtfm.node.model.placement import Placement
from dtfm.node.model.stage import Stage
from dtfm.node.training.audits.kept_work import KeptWork
from dtfm.node.training.codec_choice import Codecs, codecs_of_stage
from dtfm.node.training.looking import try_outer_steps
from dtfm.node.training.memory_budget import early_bytes, free_bytes, is_short, retry_bytes, stage_computing_bytes
from dtfm.node.training.reduction.contribution_bound import ContributionBound
from dtfm.node.training.reduction.final_gradients import FinalGradients
from dtfm.node.training.reduction.matrix_updates import orthogonalise_alone
from dtfm.node.training.reduction.reducer import Final, Reducer, Residuals
from dtfm.node.training.reduction.sending_order import sending_order
from dtfm.node.training.step import pipeline
from dtfm.node.training.step.compute import compute_held_out, compute_step
from dtfm.node.training.step.outgoing import Outgoing
from dtfm.node.training.step.pipeline import NonFinite, Outcome
from dtfm.node.training.step.progress import Progress
from dtfm.node.transport.commitments import Commitments
from dtfm.node.transport.frame_validation import Expectations, tensor_sizes
from dtfm.node.transport.kept import Offer
from dtfm.node.transport.receiver import Arrival, Closed, Inbox, Receiver, Topic, TopicQueue
from dtfm.node.transport.sender import Sender, What
from dtfm.protos.control_pb2 import Commit, Device, Peer, StepReady
from dtfm.protos.frame import Kind
from dtfm.protos.outer import MOST_OUTER_STEPS, OuterStep
from dtfm.protos.plan_pb2 import Run


@dataclass(frozen=True, slots=True)
class Inherited:
    """The things that a generation takes over from the one before.

    progress: on the next step with the same stage. codecs: the present ones. The usual sizes: of this stage's gradients and of
    its changes in exchanges. residuals: of a sparse codec there.
    """

    progress: Progress | None = None
    codecs: Codecs | None = None
    bound: ContributionBound | None = None
    bound_of_changes: ContributionBound | None = None
    residuals: Residuals = field(default_factory=dict)


class Generation:
    """Made when a plan is adopted, closed when the next one comes. For one thread, except ``receiver`` and ``close``."""

    def __init__(
        self,
        loaded: LoadedRun,
        placement: Placement,
        stage: Stage,
        applied: int,
        sender: Sender,
        hardware: Device,
        bandwidth: Mapping[str, float],
        inherited: Inherited,
        around: Iterable[Peer] = (),
    ) -> None:
        """``applied`` is the last step in the stage's state. ``bandwidth`` of this node's links is in bytes per second, by
        destination. ``around`` are the nodes of its stage and of the neighbouring stages, and all nodes with a common bucket."""
        self.placement = placement
        self.stage = stage
        self.around = {peer.node: peer for peer in around}
        self.loaded = loaded
        self._audited = loaded.run.trust.audit_rate > 0
        self._sender = sender
        self._flops = hardware.flops
        self._bandwidth = dict(bandwidth)
        on_device, on_host = stage.state_bytes
        if (
            placement.rounds.count and codec_named(loaded.run.network.exchange).sparse
        ):  # the elements left out, of two exchanges
            on_host += 2 * sum(bucket.parameters.nbytes for bucket in stage.buckets.values())
        if placement.rounds.count and not loaded.run.train.outer_rate:  # the own parameters, while others are tried
            on_host += sum(bucket.parameters.nbytes for bucket in stage.buckets.values())
        if self._audited and placement.rounds.count:  # _sent_changes
            codec = codec_named(loaded.run.network.exchange)
            on_host += sum(encoded_bytes(codec, b.spec.size, b.parameters.dtype) for b in stage.buckets.values())
        self.free_bytes = free = free_bytes(
            on_device + stage_computing_bytes(loaded.run, placement, stage), on_host, hardware
        )
        self._retry_bytes = retry_bytes(free)
        self._is_short = is_short(on_device + on_host, hardware)
        self.progress = inherited.progress or Progress(placement.generation, applied + 1, self._retry_bytes)
        self.progress.generation, self.progress.room = placement.generation, self._retry_bytes
        self.sizes = tensor_sizes(stage, loaded.run.train.micro_batch)
        self.codecs = self._choose_codecs(inherited.codecs)
        self._queue: TopicQueue[Topic, Arrival] = TopicQueue()
        groups = (placement.exchange_groups or placement.groups).values()
        early = early_bytes(free, len({member for group in groups for member in group.members}) - 1)
        expect = Expectations(placement, self.sizes, self.codecs.exchange.sparse)
        inbox = Inbox(self._queue, lambda step: self._reducer_of(step).queue)
        self.receiver = Receiver(expect, applied, inbox.deliver, early)
        is_open = loaded.run.trust.mode == Run.Trust.OPEN
        bound = inherited.bound or ContributionBound() if is_open else None
        of_changes = inherited.bound_of_changes or ContributionBound() if is_open else None
        to_peers = self._send, self.receiver.let_go
        with_matrices = {index: bucket for index, bucket in stage.buckets.items() if bucket.spec.orthogonal}
        self.reducer = Reducer(placement, *to_peers, bound=bound, came=self._came, with_matrices=with_matrices)
        everywhere = replace(placement, groups=placement.exchange_groups)
        self.exchanger = Reducer(everywhere, *to_peers, inherited.residuals, of_changes, self._came)
        """Of the exchanges, which there are only with rounds."""
        self.commitments: Commitments | None = None
        """Of the step last trained, where work is audited and this step began here."""
        self._reduced_with = Codec.OFF  # in the step last trained
        self._sent_changes: dict[tuple[int, int], Encoded] = {}
        """By bucket and piece, what was sent in the exchange in hand, where work is audited."""
        # Tensors of an interrupted step that the neighbours have from an earlier generation.
        self._neighbours_have: dict[Kind, frozenset[int]] = {}
        self._final_gradients = FinalGradients(stage, self.reducer.queue)
        give_back(now=True)  # what it took to make or load the state

    @property
    def number(self) -> int:
        return self.placement.generation

    @property
    def run(self) -> Run:
        return self.loaded.run

    def links_changed(self, bandwidth: Mapping[str, float]) -> bool:
        """Between two steps: some links from here now have this ``bandwidth``. Returns whether the codecs have changed."""
        self._bandwidth.update(bandwidth)
        before, self.codecs = self.codecs, self._choose_codecs(self.codecs)
        return self.codecs != before

    def neighbours_have(self, activations: Collection[int], gradients: Collection[int]) -> None:
        """Of the step in progress: the micro-batches whose activation the next stage has, and whose gradient the previous."""
        self._neighbours_have = {Kind.ACTIVATION: frozenset(activations), Kind.GRADIENT: frozenset(gradients)}

    def train(self, step: int) -> tuple[Outcome, float]:
        """Forward and backward, as far as ``progress`` lacks them, then the reduction of ``step``.

        Returns the outcome, and the squared norm of the gradients that this node counts. Raises NonFinite, and Closed when the
        step is called off.
        """
        assert self.progress.step == step
        begins = self.progress.reports_nothing and not any(self._neighbours_have.values())
        self.commitments = Commitments() if self._audited and begins else None
        gradients = self._gradients()
        self._restore(gradients)
        reduction: Future[None] | None = None
        try:
            reduction = self._start_reduction(step, gradients)
            outgoing = self._outgoing()
            outgoing.send_again()
            tensors = self._queue, outgoing.hand_on, self.commitments
            before_last_backward = partial(self._final_gradients.expect, step)
            compute = compute_step(self.loaded, self.placement, self.stage, step)
            outcome = pipeline.TrainingStep(
                self.placement, self.progress, compute, *tensors, before_last_backward
            ).run()
            self._final_gradients.tell_rest()
            with WORK.waiting():  # the reduction has a thread, which works or waits by itself
                reduction.result()
            orthogonalise_alone(self.stage.buckets, self.placement)
        except BaseException as error:
            if not isinstance(error, Closed):
                self.progress.spoil()
            self.close(f"step {step} ended: {error}")
            raise
        finally:
            self._final_gradients.forget()
            reduction = None  # what it has raised refers to this frame: a cycle would keep the stage alive
        return outcome, self._counted_norm(gradients)

    def exchange(self, step: int) -> tuple[Outcome, float]:
        """Replaces the gradients by the sum of all islands' changes since the last exchange.

        Returns the outcome, and the squared norm of the sum, as far as this node counts it. Raises NonFinite, and Closed when the
        step is called off.
        """
        began, gradients, codec = time.monotonic(), self._gradients(), self.codecs.exchange
        self.commitments = Commitments() if self._audited else None
        own = 0.0
        for index, change in gradients.items():
            factor = self.placement.share_in_exchange(index, codec, step)
            change_since_exchange(self.stage.buckets[index], factor, change)
            if factor and self.placement.node in self.placement.groups[index].counted_by:
                own += squared_norms([change])[0] / factor**2
            self.exchanger.queue.put(step, Final(index, after(self.stage.device)))
        reduction = self.exchanger.start(step, gradients, codec, lambda *_: None)
        try:
            with WORK.waiting():  # the reduction has a thread, which works or waits by itself
                reduction.result()
        except BaseException as error:
            self.close(f"step {step} ended: {error}")
            raise
        finally:
            del reduction  # see train
        outcome = Outcome(0.0, 0, 0.0, time.monotonic() - began, squared_change_norm=own)
        return outcome, self._counted_norm(gradients)

    def look(self, step: int, outer_steps: Sequence[OuterStep], exchanged: Outcome) -> Outcome:
        """The outcome of an exchange that has its sum, with the losses under each of these outer steps. Raises Closed."""
        began = time.monotonic()
        compute = compute_held_out(self.loaded, self.placement, self.stage, first=step)

        def losses(place: int) -> tuple[float, ...]:
            placement, send = self.placement, partial(self._send_held_out, Kind.LOOK, step, place)
            mine = placement.looked, placement.next
            return pipeline.evaluate(placement, *mine, ("look", step, place), compute, self._queue, send)

        looked = try_outer_steps(self.stage, outer_steps, losses)
        return replace(exchanged, looked=looked, looking_seconds=time.monotonic() - began)

    def vote(self, step: int, outcome: Outcome, squared_norm: float, state_digest: bytes) -> StepReady:
        """The vote for ``step``, which `train` or `exchange` has done with this outcome. ``state_digest``: of the state before
        it. If work is audited, waits for tensors that are still being encoded."""
        sent, received = self.commitments.report() if self.commitments is not None else ((), ())
        return StepReady(
            generation=self.number,
            step=step,
            squared_gradient_norm=squared_norm,
            loss_sum=outcome.loss_sum,
            samples=outcome.samples,
            state_digest=state_digest,
            compute_seconds=outcome.compute_seconds,
            wait_seconds=outcome.wait_seconds,
            arrived=self.receiver.take_paces(),
            clipped=(clipped for _, clipped in sorted(self._reducer_of(step).clipped.items())),
            sent=sent,
            received=received,
            losses=outcome.losses if self.commitments is not None else (),
            kept=self.commitments is not None and self.progress.keeps_all,
            looked=outcome.looked,
            looking_seconds=outcome.looking_seconds,
            squared_change_norm=outcome.squared_change_norm,
        )

    def offer(self, step: int) -> Offer:
        """The tensors sent in ``step``, the one last trained."""
        work = KeptWork(self.placement, self.progress, self.sizes, self._reduced_with, self._sent_changes)
        return Offer(self.number, step, frozenset(self.around), work.find)

    def apply(self, commit: Commit) -> None:
        """Updates the state with the reduced gradients. From now on tensors that arrive for this step are stale."""
        step, rounds, train = commit.step, self.placement.rounds, self.loaded.run.train
        began = self.placement.trained_before
        if rounds.restarts:
            began = max(began, rounds.trained(rounds.rested(step - 1)))
        for index, bucket in self.stage.buckets.items():
            if rounds.restarts and rounds.at_rest(step - 1):
                bucket.forget_moments()
            terms = terms_of(commit, bucket.spec, self.placement.island)
            if rounds.exchanges(step):
                outer_step(terms.outer, bucket, bucket.gradients)
            else:
                trained = rounds.trained(step) - began
                inner_step(train, trained, terms, bucket, bucket.gradients, bucket.updates)
            self.stage.refresh(index)
            WORK.did()
        self.progress.spoil()  # frees the tensors kept of it, before there are more
        self.commitments = None
        self._sent_changes.clear()
        self.progress, self._neighbours_have = Progress(self.number, step + 1, self._retry_bytes), {}
        self.receiver.advance(step)
        self._reducer_of(step).commit(step)
        self._queue.forget(("train", step))
        self._queue.forget(("evaluate", step - 1))
        for place in range(MOST_OUTER_STEPS):
            self._queue.forget(("look", step, place))
        give_back(now=self._is_short)

    def evaluate(self, step: int) -> tuple[float, ...]:
        """After ``step``, and before the next one: see `pipeline.evaluate`. Raises Closed."""
        placement, send = self.placement, partial(self._send_held_out, Kind.EVALUATION, step, 0)
        compute = compute_held_out(self.loaded, placement, self.stage)
        mine = placement.evaluation_micro_batches, placement.evaluation_next
        return pipeline.evaluate(placement, *mine, ("evaluate", step), compute, self._queue, send)

    def _send_held_out(
        self, kind: Kind, step: int, part: int, destination: str, number: int, tensor: torch.Tensor
    ) -> None:
        what = What(kind, self.number, step, number, part, tensor.numel(), tensor.dtype)
        self._sender.send(destination, what, self._sender.encode(what, tensor, self.codecs.of(kind, destination)))

    def close(self, reason: str) -> None:
        """Makes `train` and `evaluate` raise Closed, now and later. From any thread."""
        self._queue.close(reason)
        self.reducer.queue.close(reason)
        self.exchanger.queue.close(reason)
        self.receiver.close()

    def release(self) -> None:
        """After ``close``: ends the threads, and removes the hooks. Without users, generation and stage are then freed."""
        self._final_gradients.remove()
        self._sent_changes.clear()
        self.reducer.close()
        self.exchanger.close()

    def _choose_codecs(self, previous: Codecs | None) -> Codecs:
        mine = self.loaded.run, self.placement, self.stage, self.sizes
        return codecs_of_stage(*mine, bandwidth=self._bandwidth, flops=self._flops, previous=previous)

    # The parts of a step

    def _gradients(self) -> dict[int, torch.Tensor]:
        buckets = self.stage.buckets
        return {i: buckets[i].gradients for i in sending_order(bucket.spec for bucket in buckets.values())}

    def _restore(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Makes the gradients what they were before any reduction."""
        for index, mine in self.progress.take_unreduced().items():
            gradients[index].copy_(mine)
        if not self.progress.finished:
            self.stage.zero_gradients()
        if self.progress.finished >= set(self.placement.micro_batches):
            self._final_gradients.expect(self.progress.step)

    def _start_reduction(self, step: int, gradients: Mapping[int, torch.Tensor]) -> Future[None]:
        groups = self.placement.groups
        reduced = sum(flat.nbytes for index, flat in gradients.items() if len(groups[index].members) > 1)
        keeps = reduced <= self._retry_bytes  # keep all or none: if one is missing, a retry starts from scratch
        progress = self.progress
        keep = progress.keep_unreduced if keeps else lambda *_: progress.spoil()
        self._reduced_with = self.codecs.reduction
        return self.reducer.start(step, gradients, self.codecs.reduction, keep)

    def _counted_norm(self, gradients: Mapping[int, torch.Tensor]) -> float:
        groups, node = self.placement.groups, self.placement.node
        norm = sum(squared_norms(flat for i, flat in sorted(gradients.items()) if node in groups[i].counted_by))
        if not math.isfinite(norm):
            raise NonFinite(f"the squared gradient norm is {norm}")
        return norm

    # Tensors from peers and to them

    def _reducer_of(self, step: int) -> Reducer:
        return self.exchanger if self.placement.rounds.exchanges(step) else self.reducer

    def _came(self, arrival: Arrival) -> None:
        if self.commitments is not None:
            self.commitments.came(arrival)

    def _outgoing(self) -> Outgoing:
        """The present step's tensors to the neighbouring stages."""
        neighbours_have, to_peers = self._neighbours_have, (self._sender.encode, self._send)
        return Outgoing(self.placement, self.progress, self.codecs, self.sizes, neighbours_have, *to_peers)

    def _send(self, destination: str, what: What, encoded: Future[Encoded]) -> None:
        if self.commitments is not None:
            self.commitments.sends(destination, what, encoded)
            if what.kind is Kind.REDUCE and self.placement.rounds.exchanges(what.step):
                found = encoded.result()  # a codec that is off gives a view of memory that the sum overwrites
                self._sent_changes[what.index, what.part] = Encoded(found.codec, memoryview(bytearray(found.data)))
        self._sender.send(destination, what, encoded)
