"""The updates of steps and exchanges. AdamW is written so that replicas on different devices stay equal bit for bit."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby

import torch

from dtfm.kernels.transfer import to_host
from dtfm.node.model.bucket import Bucket, BucketSpec
from dtfm.node.model.optimizer.muon import muon
from dtfm.protos.control_pb2 import Commit
from dtfm.protos.outer import OuterStep
from dtfm.protos.plan_pb2 import Run

CPU_CHUNK = 1 << 16
"""Elements that a CPU squares at a time, so that they stay in its cache."""

GPU_CHUNK = 1 << 24
"""Elements that a GPU updates or squares at a time: either takes memory for several copies of them."""

HOST_CHUNK = 1 << 20
"""The most elements that one thread of the host updates at a time."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a bucket's update, from the step's commit. ``clip``: the factor of its gradients. The outer rate and momentum
    are an exchange's, and 0 in other steps."""

    clip: float
    learning_rate: float
    weight_decay: float
    outer_rate: float = 0.0
    outer_momentum: float = 0.0

    @property
    def outer(self) -> OuterStep:
        return OuterStep(self.outer_rate, self.outer_momentum)


def terms_of(commit: Commit, spec: BucketSpec, island: int | None = None) -> Terms:
    """The terms of a bucket of this ``island``; None: there is one. Raises ValueError if the commit says nothing of it."""
    first = min(spec.layers)
    for clip in commit.clips:
        if clip.first_layer <= first < clip.past_last_layer and island in (None, clip.island):
            outer = commit.outer.rate, commit.outer.momentum
            return Terms(clip.factor, commit.learning_rate, commit.weight_decay, *outer)
    raise ValueError(f"the commit of step {commit.step} says nothing of layer {first} in island {island or 0}")


def squared_norms(flats: Iterable[torch.Tensor]) -> list[float]:
    """The sum of the squares of each of ``flats`` (1-D, any dtype and device), in float64.

    torch's norms would convert a whole tensor to float64 first. That takes twice the memory of a float32 bucket.
    """
    totals = []
    for flat in flats:
        totals.append(torch.zeros((), dtype=torch.float64, device=flat.device))
        for chunk in torch.split(flat, GPU_CHUNK if flat.is_cuda else CPU_CHUNK):
            wide = chunk.double()
            totals[-1] += torch.dot(wide, wide)
    return [float(total) for total in torch.stack(totals).tolist()] if totals else []


def inner_step(
    train: Run.Train, step: int, terms: Terms, bucket: Bucket, gradients: torch.Tensor, updates: torch.Tensor
) -> None:
    """A training step's update of a bucket's state, in place: Muon's for the matrices that it has, with flat ``updates`` that
    one replica has found, and AdamW's for the others. ``step``: the number of steps since the moments were zero."""
    muon(terms.learning_rate, terms.weight_decay, bucket, gradients, updates)
    adamw(train, step, terms, bucket, gradients)


@torch.no_grad()
def adamw(train: Run.Train, step: int, terms: Terms, bucket: Bucket, gradients: torch.Tensor) -> None:
    """Updates a bucket's state in place, except Muon's matrices, on the device or in the host's memory, with flat
    ``gradients`` of its dtype. A GPU that has the state overwrites ``gradients``. ``step``: the number of steps since the
    moments were zero. ``train`` has the settings that no operator changes.

    The rule is torch.optim.AdamW's (Loshchilov and Hutter, arXiv 1711.05101), in separate operations. torch's own kernels fuse
    multiply-adds differently on each device. Separate operations, each rounded by IEEE 754, give a CPU and a GPU replica the
    same bits. Division by a scalar is written as multiplication, because torch divides on some devices and multiplies on
    others. Weight decay applies to what `BucketSpec.decays` says.
    """
    rate = terms.learning_rate
    scalars = (  # in the order of kernels/adamw.py
        1 - rate * terms.weight_decay,  # the part that remains of a parameter that decays
        terms.clip,
        train.beta1,  # the part that remains of the moments, and the part that is added
        1 - train.beta1,
        train.beta2,
        1 - train.beta2,
        1 / (1 - train.beta1**step),  # the factors that undo the bias of the mean and the root
        1 / math.sqrt(1 - train.beta2**step),
        train.epsilon,
        rate,
    )
    (_on_gpu if bucket.home.type == "cuda" else _on_host)(scalars, bucket, gradients)


@torch.no_grad()
def outer_step(outer: OuterStep, bucket: Bucket, change: torch.Tensor) -> None:
    """The exchange's update of a bucket's state, in place. ``change`` is the flat change of its parameters since the last
    exchange (anchor minus parameters), summed over islands in proportion to their samples. A bucket without an anchor has the
    parameters of the last exchange.

    Nesterov's momentum, as in DiLoCo (arXiv 2311.08105): u = mu u + change; parameters = anchor - eta (change + mu u). In
    separate operations in the host's memory, so that all islands get the same bits. Raises ValueError if there is no rate: the
    commit named none.
    """
    if outer.rate <= 0:
        raise ValueError("the commit of the exchange does not say how its sum is applied")
    anchor, *momenta = bucket.shared
    for a, p, c, *us in zip(
        *(torch.split(flat, GPU_CHUNK) for flat in (anchor, bucket.parameters, change, *momenta)), strict=True
    ):
        here = to_host(c) if c.is_cuda else c
        for u in us:
            u.mul_(outer.momentum).add_(here)
            here = (u * outer.momentum).add_(here)
        a.sub_(here * outer.rate)
        if bucket.anchor is not None:
            p.copy_(a)


@torch.no_grad()
def try_outer_step(outer: OuterStep, bucket: Bucket, change: torch.Tensor, into: torch.Tensor) -> None:
    """Sets ``into`` (flat, of the bucket's size) to the parameters that `outer_step` would make, to the same bits if the
    dtype is the same. The bucket's anchor and momentum stay as they are."""
    anchor, *momenta = bucket.shared
    for a, w, c, *us in zip(*(torch.split(flat, GPU_CHUNK) for flat in (anchor, into, change, *momenta)), strict=True):
        here = to_host(c) if c.is_cuda else c
        for u in us:
            here = (u * outer.momentum).add_(here).mul_(outer.momentum).add_(here)
        w.copy_(a - here * outer.rate)


@torch.no_grad()
def change_since_exchange(bucket: Bucket, factor: float, into: torch.Tensor) -> None:
    """Sets ``into`` (flat, of the bucket's size) to the anchor minus the parameters, times ``factor``."""
    assert bucket.anchor is not None
    for a, p, c in zip(
        *(torch.split(flat, GPU_CHUNK) for flat in (bucket.anchor, bucket.parameters, into)), strict=True
    ):
        c.copy_(a).sub_(p.to(c.device)).mul_(factor)


def _on_gpu(scalars: Sequence[float], bucket: Bucket, gradients: torch.Tensor) -> None:
    decayed, clip, keep_m, add_m, keep_v, add_v, to_mean, to_root, epsilon, rate = scalars
    for name, view in bucket.views(bucket.parameters).items():
        if name not in bucket.spec.orthogonal and bucket.spec.decays(name, view.ndim):
            view.mul_(decayed)
    for p, g, m, v in _chunks(bucket, gradients):
        g.mul_(clip)
        m.mul_(keep_m)
        v.mul_(keep_v)
        v.add_((g * g).mul_(add_v))
        m.add_(g.mul_(add_m))
        denominator = v.sqrt().mul_(to_root).add_(epsilon)
        p.sub_((m * to_mean).div_(denominator).mul_(rate))


def _on_host(scalars: Sequence[float], bucket: Bucket, gradients: torch.Tensor) -> None:
    """Runs in as many threads as torch has. At the same time, the gradients that a GPU has computed are copied from it."""
    from dtfm.kernels.adamw import update  # imported here: see kernels/with_cupy.py, prepare

    threads = torch.get_num_threads()
    scalar = bucket.parameters.numpy().dtype.type
    decayed, *others = map(scalar, scalars)
    running = deque[Future[None]]()
    with ThreadPoolExecutor(threads, "adamw") as pool:
        mean, squares = bucket.moments
        squares_of = bucket.without_matrices(squares)
        each = [*map(bucket.views, (bucket.parameters, gradients, mean)), squares_of]
        for name in squares_of:
            views = [of[name] for of in each]
            keep = decayed if bucket.spec.decays(name, views[0].ndim) else scalar(1)
            for parts in zip(*(torch.split(view.flatten(), HOST_CHUNK) for view in views), strict=True):
                here = [(to_host(part) if part.is_cuda else part).numpy() for part in parts]
                running.append(pool.submit(update, *here, keep, *others))
                if len(running) > 2 * threads:
                    running.popleft().result()
        while running:
            running.popleft().result()


def _chunks(bucket: Bucket, gradients: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Parameters, gradients and moments, GPU_CHUNK elements at a time. Muon's matrices lie between them."""
    mean, squares = bucket.moments
    begin = at = 0
    for is_muons, parameters in groupby(bucket.spec.parameters, lambda each: each[0] in bucket.spec.orthogonal):
        end = begin + sum(math.prod(shape) for _, shape in parameters)
        if not is_muons:
            flat = (
                *(tensor[begin:end] for tensor in (bucket.parameters, gradients, mean)),
                squares[at : at + end - begin],
            )
            yield from zip(*(torch.split(each, GPU_CHUNK) for each in flat), strict=True)
            at += end - begin
        begin = end
