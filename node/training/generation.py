"""This node's part in one generation: its stage, its groups, and the steps it trains with them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, starmap

import numpy as np
import torch

from dtfm.kernels.codec import Codec, Encoded, codec_named, encode, encoded_bytes
from dtfm.kernels.memory import give_back
from dtfm.node.data.dataset import Batch, Indices
from dtfm.node.data.samples import evaluation_samples
from dtfm.node.host.cuda_streams import after, brought
from dtfm.node.host.work import WORK
from dtfm.node.model.layer_memory import layer_memory
from dtfm.node.model.loaded_run import LoadedRun
from dtfm.node.model.loss import Scored
from dtfm.node.model.muon import orthogonalise
from dtfm.node.model.optimizer import change_since_exchange, inner_step, outer_step, squared_norms, terms_of
from dtfm.node.model.placement import Placement
from dtfm.node.model.precision import compute_dtype, run_dtype
from dtfm.node.model.stage import Stage
from dtfm.node.training import pipeline
from dtfm.node.training.compression import Codecs, choose_codecs
from dtfm.node.training.contribution_bound import ContributionBound
from dtfm.node.training.looking import try_outer_steps
from dtfm.node.training.loss_weights import LossWeights, Part, by_sample, by_token
from dtfm.node.training.memory_budget import computing_bytes, early_bytes, free_bytes, is_short, retry_bytes
from dtfm.node.training.pipeline import Compute, NonFinite, Outcome, Topic
from dtfm.node.training.progress import Progress
from dtfm.node.training.reduction import Final, Reducer, Residuals, sending_order
from dtfm.node.transport.commitments import Commitments
from dtfm.node.transport.frame_validation import Expectations, TensorSizes, tensor_sizes
from dtfm.node.transport.kept import Offer, Tensor
from dtfm.node.transport.receiver import Arrival, Receiver
from dtfm.node.transport.sender import Sender, What
from dtfm.node.transport.topic_queue import Closed, TopicQueue
from dtfm.protos.control_pb2 import Commit, Device, Peer, StepReady
from dtfm.protos.frame import Kind
from dtfm.protos.outer import MOST_OUTER_STEPS, OuterStep
from dtfm.protos.peer_pb2 import KeptRequest
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
        self._loaded = loaded
        self._audited = loaded.run.trust.audit_rate > 0
        self._sender = sender
        self._flops = hardware.flops
        self._bandwidth = dict(bandwidth)
        on_device, on_host = stage.state_bytes
        if placement.rounds.count and loaded.run.network.exchange == "topk":  # the elements left out, of two exchanges
            on_host += 2 * sum(bucket.parameters.nbytes for bucket in stage.buckets.values())
        if placement.rounds.count and not loaded.run.train.outer_rate:  # the own parameters, while others are tried
            on_host += sum(bucket.parameters.nbytes for bucket in stage.buckets.values())
        if self._audited and placement.rounds.count:  # _sent_changes
            codec = codec_named(loaded.run.network.exchange)
            on_host += sum(encoded_bytes(codec, b.spec.size, b.parameters.dtype) for b in stage.buckets.values())
        self.free_bytes = free = free_bytes(on_device + self._computing_bytes(), on_host, hardware)
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
        self.receiver = Receiver(expect, applied, self._deliver, early)
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
        # During the last backward: the number of parameters of each bucket that still get gradients.
        self._unfinished: dict[int, int] = {}
        # Tensors of an interrupted step that the neighbours have from an earlier generation.
        self._neighbours_have: dict[Kind, frozenset[int]] = {}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._accumulated, index))  # type: ignore[no-untyped-call]
            for index, parameters in stage.parameters.items()
            for parameter in parameters
        ]
        give_back(now=True)  # what it took to make or load the state

    @property
    def number(self) -> int:
        return self.placement.generation

    @property
    def run(self) -> Run:
        return self._loaded.run

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
            self._send_again()
            tensors = self._queue, self._hand_on, self._came
            outcome = pipeline.TrainingStep(
                self.placement, self.progress, self.computing(step), *tensors, self._expect_last_gradients
            ).run()
            # A node without micro-batches, or a parameter without a gradient, adds nothing: that is final too.
            for index in self._unfinished:
                self._tell_final(step, index)
            with WORK.waiting():  # the reduction has a thread, which works or waits by itself
                reduction.result()
            self._orthogonalise_alone()
        except BaseException as error:
            if not isinstance(error, Closed):
                self.progress.spoil()
            self.close(f"step {step} ended: {error}")
            raise
        finally:
            self._unfinished.clear()
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
            factor = self.placement.share_in_exchange(index, codec)
            change_since_exchange(self.stage.buckets[index], factor, change)
            if self.placement.node in self.placement.groups[index].counted_by:
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
        compute = self._compute(lambda number: self._evaluation_batch(step + number), self._weights_of_held_out())

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

    def computing(self, step: int) -> Compute:
        """The functions that compute any micro-batch of ``step``."""
        trained, of_step = self.placement.rounds.trained(step), self.placement.all_micro_batches
        taken = self.placement.owed.taken(trained, range(of_step), of_step)
        numbers = [*chain.from_iterable(starmap(range, taken))]
        return self._compute(partial(self._training_batch, numbers), self._weights(numbers, self.placement.places))

    def computing_these(self, of_step: Sequence[int]) -> Compute:
        """The same for a step that has these micro-batches of the run, all of them of one island."""
        return self._compute(partial(self._training_batch, of_step), self._weights(of_step, range(len(of_step))))

    def offer(self, step: int) -> Offer:
        """The tensors sent in ``step``, the one last trained."""
        work = KeptWork(self.placement, self.progress, self.sizes, self._reduced_with, self._sent_changes)
        return Offer(self.number, step, frozenset(self.around), work.find)

    def apply(self, commit: Commit) -> None:
        """Updates the state with the reduced gradients. From now on tensors that arrive for this step are stale."""
        step, rounds, train = commit.step, self.placement.rounds, self._loaded.run.train
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
        compute = self._compute(self._evaluation_batch, self._weights_of_held_out())
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
        for hook in self._hooks:
            hook.remove()
        self._sent_changes.clear()
        self.reducer.close()
        self.exchanger.close()

    def _choose_codecs(self, previous: Codecs | None) -> Codecs:
        micro_batch, layers = self._loaded.run.train.micro_batch, self.stage.model.layers
        forward_flops = micro_batch * sum(layer.flops for layer in layers[self.stage.first : self.stage.past_last])
        codecs = choose_codecs(
            self._loaded.run.network,
            self.placement,
            self.sizes,
            bandwidth=self._bandwidth,
            micro_batch_seconds=self.stage.model.passes * forward_flops / self._flops,
            previous=previous,
        )
        for codec in codecs.all:  # whatever a codec loads or compiles, it does now
            for dtype in {self.sizes.dtype, self.sizes.reduced}:
                encode(codec, torch.zeros(1, dtype=dtype, device=self.stage.device))
        return codecs

    def _computing_bytes(self) -> int:
        stage, train = self.stage, self._loaded.run.train
        memory = layer_memory(
            stage.model, train.micro_batch, compute_dtype(self._loaded.run), run_dtype(self._loaded.run)
        )[stage.first : stage.past_last]
        inputs = [
            math.prod(stage.model.activation_shape(layer - 1, train.micro_batch)) * stage.dtype.itemsize if layer else 0
            for layer in range(stage.first, stage.past_last)
        ]
        in_flight = min(self.placement.in_flight, len(self.placement.micro_batches))
        return computing_bytes(memory, inputs, in_flight, stage.keeping.checkpointing)

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
            self._expect_last_gradients()

    def _start_reduction(self, step: int, gradients: Mapping[int, torch.Tensor]) -> Future[None]:
        groups = self.placement.groups
        reduced = sum(flat.nbytes for index, flat in gradients.items() if len(groups[index].members) > 1)
        keeps = reduced <= self._retry_bytes  # keep all or none: if one is missing, a retry starts from scratch
        progress = self.progress
        keep = progress.keep_unreduced if keeps else lambda *_: progress.spoil()
        self._reduced_with = self.codecs.reduction
        return self.reducer.start(step, gradients, self.codecs.reduction, keep)

    def _orthogonalise_alone(self) -> None:
        """Finds the updates of Muon's matrices in buckets that nobody reduces with this node."""
        for index, bucket in self.stage.buckets.items():
            for name in bucket.spec.orthogonal if len(self.placement.groups[index].members) == 1 else ():
                orthogonalise(bucket, bucket.gradients, name)
                WORK.did()

    def _counted_norm(self, gradients: Mapping[int, torch.Tensor]) -> float:
        groups, node = self.placement.groups, self.placement.node
        norm = sum(squared_norms(flat for i, flat in sorted(gradients.items()) if node in groups[i].counted_by))
        if not math.isfinite(norm):
            raise NonFinite(f"the squared gradient norm is {norm}")
        return norm

    def _expect_last_gradients(self) -> None:
        self._unfinished = {index: len(parameters) for index, parameters in self.stage.parameters.items()}

    def _accumulated(self, bucket: int, _parameter: torch.Tensor) -> None:
        if bucket in self._unfinished:
            self._unfinished[bucket] -= 1
            if self._unfinished[bucket] == 0:
                del self._unfinished[bucket]
                self._tell_final(self.progress.step, bucket)

    def _tell_final(self, step: int, bucket: int) -> None:
        self.reducer.queue.put(step, Final(bucket, after(self.stage.device)))

    def _compute(self, batch: Callable[[int], Batch], weights: LossWeights) -> Compute:
        stage, train = self.stage, self._loaded.run.train
        shape = stage.model.activation_shape

        def positions(number: int) -> torch.Tensor | None:
            found = self._loaded.data.positions(batch(number)[0])
            return None if found is None else brought(found, stage.device)

        def loss(
            x: torch.Tensor,
            labels: torch.Tensor,
            positions: torch.Tensor | None,
            only: Sequence[torch.nn.Parameter] | None = None,
        ) -> Scored:
            scored = stage.loss(x, labels, weights.micro_batch, positions, only, weights.label)
            return Scored(scored.mean * weights.told, scored.weighted)

        return Compute(
            forward=stage.forward,
            loss=loss,
            inputs=lambda number: brought(batch(number)[0], stage.device),
            labels=lambda number: brought(batch(number)[1], stage.device),
            positions=positions if self._loaded.data.sample.isolated else lambda number: None,
            input_shape=shape(stage.first - 1, train.micro_batch) if stage.first else (),
            output_shape=shape(stage.past_last - 1, train.micro_batch),
            device=stage.device,
            micro_batch=train.micro_batch,
        )

    def _weights(self, of_step: Sequence[int], places: range) -> LossWeights:
        """``of_step``: the micro-batches of the run that a step has. ``places``: of them, the island's."""
        if not self._counts_tokens:
            return by_sample(len(places))

        def learnt(numbers: Sequence[int]) -> Part:
            samples = np.concatenate([self._samples(number) for number in numbers])
            return Part(len(numbers), self._loaded.data.training_learnt(samples))

        of_island = learnt(of_step[places.start : places.stop])
        return by_token(of_island, learnt(of_step) if len(places) < len(of_step) else of_island)

    def _weights_of_held_out(self) -> LossWeights:
        train, data = self._loaded.run.train, self._loaded.data
        number = train.evaluation_samples // train.micro_batch
        if not self._counts_tokens:
            return by_sample(number)
        samples = evaluation_samples(0, micro_batch=train.evaluation_samples, count=data.evaluation_count)
        whole = Part(number, data.evaluation_learnt(samples))
        return by_token(whole, whole)

    @property
    def _counts_tokens(self) -> bool:
        """Whether this node needs the numbers of learnt tokens: a node without the last layer computes no loss, and may not have
        the samples."""
        return self._loaded.run.train.loss_per_token and self.placement.last

    def _samples(self, number: int) -> Indices:
        """The training samples of a micro-batch of the run."""
        run = self._loaded.run
        return self._loaded.data.training_samples(run.seed, number, run.train.micro_batch)

    def _training_batch(self, of_step: Sequence[int], number: int) -> Batch:
        """``of_step``: which micro-batches of the run a step has."""
        return self._loaded.data.training_batch(self._samples(of_step[number]))

    def _evaluation_batch(self, number: int) -> Batch:
        data, train = self._loaded.data, self._loaded.run.train
        number %= train.evaluation_samples // train.micro_batch  # strangers compute each twice: see held_out_chains
        indices = evaluation_samples(number, micro_batch=train.micro_batch, count=data.evaluation_count)
        return data.evaluation_batch(indices)

    # Tensors from peers and to them

    def _deliver(self, arrival: Arrival) -> None:
        header = arrival.header
        match header.kind:
            case Kind.ACTIVATION | Kind.GRADIENT:
                self._queue.put(("train", header.step), arrival)
            case Kind.EVALUATION:
                self._queue.put(("evaluate", header.step), arrival)
            case Kind.LOOK:
                self._queue.put(("look", header.step, header.part), arrival)
            case Kind.REDUCE | Kind.GATHER | Kind.ORTHOGONAL:
                self._reducer_of(header.step).queue.put(header.step, arrival)

    def _reducer_of(self, step: int) -> Reducer:
        return self.exchanger if self.placement.rounds.exchanges(step) else self.reducer

    def _came(self, arrival: Arrival) -> None:
        if self.commitments is not None:
            self.commitments.came(arrival)

    def _send_again(self) -> None:
        """Sends tensors that were computed here in an earlier generation and that the neighbours lack."""
        progress, placement = self.progress, self.placement
        for (kind, number), encoded in sorted(progress.sent.items(), key=lambda item: item[0]):
            destination = (placement.next if kind is Kind.ACTIVATION else placement.previous).get(number)
            if destination is not None and number not in self._neighbours_have.get(kind, ()):
                self._send(destination, self._what(kind, number), encoded)

    def _hand_on(self, kind: Kind, destination: str, number: int, tensor: torch.Tensor) -> None:
        """Keeps a tensor for another attempt, and sends it unless the neighbour has it."""
        codec, what = self.codecs.of(kind, destination), self._what(kind, number)
        encoded = self._sender.encode(what, tensor, codec)
        # First, as sending may be called off.
        self.progress.keep(kind, number, encoded, encoded_bytes(codec, tensor.numel(), tensor.dtype))
        if number not in self._neighbours_have.get(kind, ()):
            self._send(destination, what, encoded)

    def _what(self, kind: Kind, number: int) -> What:
        elements = self.sizes.input if kind is Kind.GRADIENT else self.sizes.output
        return What(kind, self.number, self.progress.step, number, 0, elements, self.stage.dtype)

    def _send(self, destination: str, what: What, encoded: Future[Encoded]) -> None:
        if self.commitments is not None:
            self.commitments.sends(destination, what, encoded)
            if what.kind is Kind.REDUCE and self.placement.rounds.exchanges(what.step):
                found = encoded.result()  # a codec that is off gives a view of memory that the sum overwrites
                self._sent_changes[what.index, what.part] = Encoded(found.codec, memoryview(bytearray(found.data)))
        self._sender.send(destination, what, encoded)


@dataclass(frozen=True, slots=True)
class KeptWork:
    """The tensors that ``progress`` sent, for audits: its gradients to replicas with the codec ``reduction``, and its
    ``changes``."""

    placement: Placement
    progress: Progress
    sizes: TensorSizes
    reduction: Codec
    changes: Mapping[tuple[int, int], Encoded]

    def find(self, request: KeptRequest) -> Tensor:
        """A tensor in the bytes that were sent; nobody writes to its memory again. From any thread. Raises LookupError."""
        match request.kind:
            case Kind.ACTIVATION | Kind.GRADIENT if not request.part:
                encoded = self._encoded(Kind(request.kind), request.index)
                elements = self.sizes.output if request.kind == Kind.ACTIVATION else self.sizes.input
                dtype = self.sizes.dtype
            case Kind.REDUCE:
                encoded, elements = self._addend(request.index, request.part)
                dtype = self.sizes.reduced
            case _:
                raise LookupError(f"NOT_KEPT: tensors of kind {request.kind} are not kept")
        at = (request.generation, request.step, request.index, request.part)
        return What(Kind(request.kind), *at, elements, dtype).header(encoded), encoded.data

    def _encoded(self, kind: Kind, number: int) -> Encoded:
        sent = self.progress.sent.get((kind, number))
        if sent is None or not sent.done():
            raise LookupError(f"NOT_KEPT: {kind.name} {number} is not kept here")
        return sent.result()

    def _addend(self, bucket: int, part: int) -> tuple[Encoded, int]:
        """(this node's own gradients of a piece, or its changes, in the bytes that it sent; elements)."""
        if (change := self.changes.get((bucket, part))) is not None:
            start, stop = self.placement.exchange_groups[bucket].piece(self.sizes.buckets[bucket], part)
            return change, stop - start
        if (mine := self.progress.unreduced.get(bucket)) is not None:
            group = self.placement.groups[bucket]
            start, stop = group.piece(mine.numel(), part)
            if stop > start and group.owner(part) != self.placement.node:
                return encode(self.reduction, mine[start:stop]), stop - start
        raise LookupError(f"NOT_KEPT: piece {part} of bucket {bucket} was not sent from here, or is not kept")
