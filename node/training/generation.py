"""A node's part in one generation: its stage, its groups, and the steps it trains with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch

from dtfm.kernels.codec import Encoded, encode
from dtfm.kernels.memory import give_back
from dtfm.node.data.dataset import Batch, Data
from dtfm.node.data.samples import evaluation_samples, training_samples
from dtfm.node.model.bucket import bucket_bytes
from dtfm.node.model.optimizer import adamw, decayed_ranges, squared_norm
from dtfm.node.model.stage import Stage, loss
from dtfm.node.training import pipeline
from dtfm.node.training.compression import Codecs, choose_codecs
from dtfm.node.training.pipeline import Compute, NonFinite, Outcome, Topic
from dtfm.node.model.placement import Group, Share
from dtfm.node.training.progress import Progress, is_short, room_ahead, room_beside
from dtfm.node.training.reduction import Final, Residuals, reduce_gradients, sending_order
from dtfm.node.transport.frame_validation import Expectations
from dtfm.node.transport.receiver import Arrival, Inbox
from dtfm.node.transport.sender import Outbox, What
from dtfm.node.transport.topic_queue import Closed, Mailbox
from dtfm.protos.control_pb2 import Device
from dtfm.protos.frame import Kind
from dtfm.protos.plan_pb2 import Run


class Engagement:
    """Made when a plan is adopted, closed when the next one comes. Used by one thread, but for ``inbox`` and ``close``."""

    def __init__(
        self,
        run: Run,
        share: Share,
        groups: Mapping[int, Group],
        stage: Stage,
        data: Data,
        outbox: Outbox,
        applied: int,
        bandwidth: Mapping[str, float],
        hardware: Device,
        progress: Progress | None = None,
        codecs: Codecs | None = None,
    ) -> None:
        """``bandwidth`` of the links from here, in bytes per second by destination; ``hardware`` is this device's;
        ``progress`` on the next step from an earlier generation, with the same ``stage``; ``codecs`` of the generation before."""
        self.share = share
        self.stage = stage
        state = sum(bucket_bytes(b.spec, stage.dtype) + b.gradients.nbytes for b in stage.buckets.values())
        self._room = room_beside(state, hardware)
        self._is_short = is_short(state, hardware)
        reduced = sum(bucket.gradients.nbytes for i, bucket in stage.buckets.items() if len(groups[i].members) > 1)
        self._keeps_unreduced = reduced <= self._room
        self.progress = progress or Progress(share.generation, applied + 1, self._room)
        self.progress.generation = share.generation
        self._run = run
        self.groups = groups
        self._data = data
        self._outbox = outbox
        self._pipeline: Mailbox[Topic, Arrival] = Mailbox()
        self._reduction: Mailbox[int, Arrival | Final] = Mailbox()
        # During the last backward: parameters per bucket that still get gradients.
        self._unfinished: dict[int, int] = {}
        # Tensors of an interrupted step that the neighbours have from an earlier generation.
        self._had: dict[Kind, frozenset[int]] = {}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._accumulated, index))  # type: ignore[no-untyped-call]
            for index, parameters in stage.parameters.items()
            for parameter in parameters
        ]
        self._reducer = ThreadPoolExecutor(1, "reduce")
        # Under a sparse codec, what the messages of committed steps, and those of the step in hand, have left out: 4 bytes each
        # per parameter that others hold too. The next generation, with other groups and pieces, begins without.
        self._carried: Residuals = {}
        self._left_out: Residuals = {}
        micro_batch = run.train.micro_batch
        self._input_shape = stage.model.activation_shape(stage.first - 1, micro_batch) if not share.first else ()
        self._output_shape = stage.model.activation_shape(stage.past_last - 1, micro_batch)
        bucket_elements = {index: bucket.spec.size for index, bucket in stage.buckets.items()}
        input_elements, output_elements = math.prod(self._input_shape), math.prod(self._output_shape)
        forward_flops = micro_batch * sum(layer.flops for layer in stage.model.layers[stage.first : stage.past_last])
        self._bandwidth = dict(bandwidth)
        self._choose_codecs = partial(
            choose_codecs,
            run.network,
            share,
            groups,
            bucket_elements,
            input_elements=input_elements,
            output_elements=output_elements,
            dtype=stage.dtype,
            micro_batch_seconds=3 * forward_flops / hardware.flops,
        )
        self.codecs = self._choose_codecs(bandwidth=self._bandwidth, previous=codecs)
        self._warm_up_codecs()
        expect = Expectations(
            share=share,
            groups=groups,
            bucket_elements=bucket_elements,
            input_elements=input_elements,
            output_elements=output_elements,
            activation_dtype=stage.dtype,
            parameter_dtype=stage.dtype,
        )
        self.inbox = Inbox(expect, applied, self._deliver, room_ahead(state, hardware, len(self.codecs.replicas)))
        give_back(now=True)  # what making or loading the state took beside it

    def links_changed(self, bandwidth: Mapping[str, float]) -> bool:
        """Between two steps: of some of the links from here, as in ``__init__``. Whether the codecs are others now."""
        self._bandwidth.update(bandwidth)
        before, self.codecs = self.codecs, self._choose_codecs(bandwidth=self._bandwidth, previous=self.codecs)
        self._warm_up_codecs()
        return self.codecs != before

    def neighbours_have(self, activations: Collection[int], gradients: Collection[int]) -> None:
        """Of the step that ``progress`` is of: micro-batches whose activation the next stage has, whose gradient the previous."""
        self._had = {Kind.ACTIVATION: frozenset(activations), Kind.GRADIENT: frozenset(gradients)}

    def train(self, step: int) -> tuple[Outcome, float]:
        """What ``progress`` lacks of forward and backward, then reduction of ``step``: (what came of it, squared norm of the
        gradients counted here).

        Raises NonFinite, and Closed when the step is called off.
        """
        progress = self.progress
        assert progress.step == step
        buckets = self.stage.buckets
        gradients = {i: buckets[i].gradients for i in sending_order(bucket.spec for bucket in buckets.values())}
        self._take_up(gradients)
        if progress.finished >= set(self.share.micro_batches):
            self._expect_last_gradients()
        reduction = self._reducer.submit(
            reduce_gradients,
            self.share.node,
            step,
            gradients,
            self.groups,
            self._reduction,
            lambda kind, peer, bucket, piece, encoded, elements, dtype: self._outbox.send_encoded(
                peer, What(kind, self.share.generation, step, bucket, piece), encoded, elements, dtype
            ),
            self.codecs.reduction,
            self._carried,
            # All of them, or none: without one the step begins anew.
            progress.keep_unreduced if self._keeps_unreduced else lambda *_: progress.spoil(),
            self.inbox.let_go,
        )
        try:
            self._send_again()
            outcome = pipeline.train_step(
                self.share,
                progress,
                self._run.train.micro_batch,
                self._run.train.global_batch,
                self._compute(partial(self._training_batch, step)),
                self._pipeline,
                self._hand_on,
                self._expect_last_gradients,
            )
            # Who has no micro-batches, or a parameter that got no gradient, adds nothing: that is final too.
            for index in self._unfinished:
                self._reduction.put(step, Final(index))
            self._left_out = reduction.result()
        except BaseException as error:
            if not isinstance(error, Closed):
                progress.spoil()
            self.close(f"step {step} ended: {error}")
            raise
        finally:
            self._unfinished.clear()
        norm = sum(
            squared_norm(flat)
            for index, flat in sorted(gradients.items())
            if self.share.node in self.groups[index].counted_by
        )
        if not math.isfinite(norm):
            raise NonFinite(f"the squared gradient norm is {norm}")
        return outcome, norm

    def apply(self, step: int, gradient_norm: float) -> None:
        """The optimizer's update with the reduced gradients; what arrives for ``step`` after this is stale."""
        for bucket in self.stage.buckets.values():
            adamw(
                self._run.train,
                step,
                gradient_norm,
                bucket.parameters,
                bucket.gradients,
                bucket.exp_avg,
                bucket.exp_avg_sq,
                decayed_ranges(bucket.spec.parameters),
            )
        self._carried = self._left_out  # not before: an aborted step was sent for nothing
        self.progress.spoil()  # lets go of what is kept of it, before there is more
        self.progress, self._had = Progress(self.share.generation, step + 1, self._room), {}
        self.inbox.advance(step)
        self._pipeline.forget(("train", step))
        self._pipeline.forget(("evaluate", step - 1))
        self._reduction.forget(step)
        give_back(now=self._is_short)

    def evaluate(self, step: int) -> tuple[float, int]:
        """(sum of losses, samples) over this node's held-out micro-batches. Raises Closed."""
        return pipeline.evaluate(
            self.share,
            step,
            self._run.train.micro_batch,
            self._compute(self._evaluation_batch),
            self._pipeline,
            partial(self._send, step),
        )

    def close(self, reason: str) -> None:
        """Whoever waits, or will wait, in ``train`` or ``evaluate`` gets Closed. From any thread."""
        self._pipeline.close(reason)
        self._reduction.close(reason)
        self.inbox.close()

    def release(self) -> None:
        """After ``close``: ends the threads, and takes off the hooks, which would keep this engagement alive with its stage."""
        for hook in self._hooks:
            hook.remove()
        self._reducer.shutdown()

    def _warm_up_codecs(self) -> None:
        """Whatever a codec needs to load or compile, it does before its first step."""
        for codec in self.codecs.all:
            encode(codec, torch.zeros(1, dtype=self.stage.dtype, device=self.stage.device))

    def _compute(self, batch: Callable[[int], Batch]) -> Compute:
        device = self.stage.device
        return Compute(
            forward=self.stage.forward,
            loss=loss,
            inputs=lambda number: batch(number)[0].to(device),
            labels=lambda number: batch(number)[1].to(device),
            activation_shape=self._input_shape,
            output_shape=self._output_shape,
            device=device,
        )

    def _training_batch(self, step: int, number: int) -> Batch:
        train = self._run.train
        indices = training_samples(
            self._run.seed,
            step,
            number,
            global_batch=train.global_batch,
            micro_batch=train.micro_batch,
            count=self._data.training_count,
        )
        return self._data.training_batch(indices)

    def _evaluation_batch(self, number: int) -> Batch:
        indices = evaluation_samples(number, micro_batch=self._run.train.micro_batch, count=self._data.evaluation_count)
        return self._data.evaluation_batch(indices)

    def _deliver(self, arrival: Arrival) -> None:
        header = arrival.header
        match header.kind:
            case Kind.ACTIVATION | Kind.GRADIENT:
                self._pipeline.put(("train", header.step), arrival)
            case Kind.EVALUATION:
                self._pipeline.put(("evaluate", header.step), arrival)
            case Kind.REDUCE | Kind.GATHER:
                self._reduction.put(header.step, arrival)

    def _expect_last_gradients(self) -> None:
        self._unfinished = {index: len(parameters) for index, parameters in self.stage.parameters.items()}

    def _accumulated(self, bucket: int, _parameter: torch.Tensor) -> None:
        if bucket in self._unfinished:
            self._unfinished[bucket] -= 1
            if self._unfinished[bucket] == 0:
                del self._unfinished[bucket]
                self._reduction.put(self.progress.step, Final(bucket))

    def _take_up(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Gradients are as they were before any reduction."""
        for index, mine in self.progress.take_unreduced().items():
            gradients[index].copy_(mine)
        if not self.progress.finished:
            self.stage.zero_gradients()

    def _send_again(self) -> None:
        """What the neighbours of an interrupted step lack of what was computed here."""
        progress, share = self.progress, self.share
        for (kind, number), sent in sorted(progress.sent.items(), key=lambda item: item[0]):
            destination = (share.next if kind is Kind.ACTIVATION else share.previous).get(number)
            if destination is None or number in self._had.get(kind, ()):
                continue
            if isinstance(sent, torch.Tensor):
                progress.sent[kind, number] = self._send(progress.step, kind, destination, number, sent)
            else:
                encoded, shape = sent.result(), self._output_shape if kind is Kind.ACTIVATION else self._input_shape
                what = What(kind, share.generation, progress.step, number)
                self._outbox.send_encoded(destination, what, encoded, math.prod(shape), self.stage.dtype)

    def _hand_on(self, kind: Kind, destination: str, number: int, tensor: torch.Tensor) -> None:
        """To a neighbour that trains the same micro-batch."""
        progress = self.progress
        progress.keep(kind, number, tensor, tensor.nbytes)  # first, as sending may be called off
        if number not in self._had.get(kind, ()):
            progress.keep(kind, number, self._send(progress.step, kind, destination, number, tensor), tensor.nbytes)

    def _send(self, step: int, kind: Kind, destination: str, index: int, tensor: torch.Tensor) -> Future[Encoded]:
        what = What(kind, self.share.generation, step, index)
        return self._outbox.send(destination, what, tensor, self.codecs.of(kind, destination))
