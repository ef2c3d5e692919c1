"""The codec of each stream from this node: chosen between steps, by the measured links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dtfm.kernels.codec import Codec, codec_named, encode, encoded_bytes
from dtfm.node.model.placement import Placement
from dtfm.node.model.stage import Stage
from dtfm.node.transport.frame_validation import TensorSizes
from dtfm.protos.control_pb2 import LinkCodec
from dtfm.protos.frame import Kind
from dtfm.protos.plan_pb2 import Run

GENTLEST_FIRST = (Codec.OFF, Codec.RAW16, Codec.I8B256)
"""The codecs that "auto" chooses from. Nothing below 8 bits is used unless the run file names it."""

EXPOSED = 0.02
"""The fraction of a step's computing time that a reduction may take beside what hides it, before bits are given up for it."""

MARGIN = 1.25
"""A codec is kept while a bandwidth within this factor of the measured one would choose it, so that noise changes nothing."""


@dataclass(frozen=True, slots=True)
class Codecs:
    """Codecs by destination. ``reduction`` is the same for all ``replicas``: members of a group must decode the same bytes.
    ``exchange``: likewise in the exchange of islands."""

    activations: Mapping[str, Codec]
    gradients: Mapping[str, Codec]
    reduction: Codec
    replicas: frozenset[str]
    exchange: Codec = Codec.OFF

    @property
    def all(self) -> set[Codec]:
        return {*self.activations.values(), *self.gradients.values(), self.reduction, self.exchange}

    @property
    def report(self) -> list[LinkCodec]:
        """The messages to the coordinator."""
        kinds = {
            "activations": self.activations,
            "gradients": self.gradients,
            "reduction": dict.fromkeys(self.replicas, self.reduction),
        }
        return [
            LinkCodec(destination=peer, tensors=tensors, codec=codec.name.lower())
            for tensors, codecs in kinds.items()
            for peer, codec in sorted(codecs.items())
        ]

    def __str__(self) -> str:
        links = [f"{link.tensors} to {link.destination} {link.codec}" for link in self.report]
        return ", ".join(links) or "nothing is sent"

    def of(self, kind: Kind, destination: str) -> Codec:
        match kind:
            case Kind.ACTIVATION | Kind.EVALUATION | Kind.LOOK:
                return self.activations[destination]
            case Kind.GRADIENT:
                return self.gradients[destination]
            case _:
                return self.reduction


def choose_codec(
    setting: str, elements: int, dtype: torch.dtype, bandwidth: float, seconds: float, previous: Codec | None = None
) -> Codec:
    """The codec that ``setting`` names, or for "auto" the gentlest that hides the transfer.

    The transfer is hidden if ``elements`` elements cross a link of ``bandwidth`` bytes per second within ``seconds``, the time
    of the computing beside it. The ``previous`` codec is kept if a bandwidth within MARGIN of this one would choose it.
    """
    if setting != "auto":
        return codec_named(setting)

    def gentlest(bandwidth: float) -> int:
        for place, codec in enumerate(GENTLEST_FIRST):
            if encoded_bytes(codec, elements, dtype) / bandwidth <= seconds:
                return place
        return len(GENTLEST_FIRST) - 1

    if previous in GENTLEST_FIRST and (
        gentlest(bandwidth * MARGIN) <= GENTLEST_FIRST.index(previous) <= gentlest(bandwidth / MARGIN)
    ):
        return previous
    return GENTLEST_FIRST[gentlest(bandwidth)]


def choose_codecs(
    network: Run.Network,
    placement: Placement,
    sizes: TensorSizes,
    *,
    bandwidth: Mapping[str, float],
    micro_batch_seconds: float,
    previous: Codecs | None,
) -> Codecs:
    """The codecs of all of a node's streams.

    ``bandwidth`` of the links from this node is by destination, in bytes per second; an unknown one counts as fast.
    ``micro_batch_seconds`` is the time of forward and backward of a micro-batch here. ``previous`` is the last choice, also
    under another plan.
    """

    def for_peers(setting: str, elements: int, peers: set[str], before: Mapping[str, Codec]) -> dict[str, Codec]:
        return {
            peer: choose_codec(
                setting, elements, sizes.dtype, bandwidth.get(peer, float("inf")), micro_batch_seconds, before.get(peer)
            )
            for peer in peers
        }

    # A member sends each other member this member's shard of its gradients, and later the sum of its own shard. No gradient is
    # final before the last backward pass, so only this pass can hide the transfer.
    groups = placement.groups
    sent = sum(2 * size * (len(groups[i].members) - 1) // len(groups[i].members) for i, size in sizes.buckets.items())
    members = {m for group in groups.values() for m in group.members} - {placement.node}
    slowest = min((bandwidth.get(member, float("inf")) for member in members), default=float("inf"))
    last_backward, all_computing = micro_batch_seconds * 2 / 3, micro_batch_seconds * len(placement.micro_batches)
    hidden = last_backward + EXPOSED * all_computing
    return Codecs(
        activations=for_peers(
            network.activations,
            sizes.output,
            {*placement.next.values(), *placement.evaluation_next.values()},
            previous.activations if previous else {},
        ),
        gradients=for_peers(
            network.gradients, sizes.input, set(placement.previous.values()), previous.gradients if previous else {}
        ),
        reduction=choose_codec(
            network.reduction, sent, sizes.reduced, slowest, hidden, previous.reduction if previous else None
        ),
        replicas=frozenset(members),
        exchange=codec_named(network.exchange) if placement.exchange_groups else Codec.OFF,
    )


def codecs_of_stage(
    run: Run,
    placement: Placement,
    stage: Stage,
    sizes: TensorSizes,
    *,
    bandwidth: Mapping[str, float],
    flops: float,
    previous: Codecs | None,
) -> Codecs:
    """The same for a stage on a device with this speed, in FLOP/s. Whatever a codec loads or compiles, it does now."""
    micro_batch, layers = run.train.micro_batch, stage.model.layers
    forward_flops = micro_batch * sum(layer.flops for layer in layers[stage.first : stage.past_last])
    codecs = choose_codecs(
        run.network,
        placement,
        sizes,
        bandwidth=bandwidth,
        micro_batch_seconds=stage.model.passes * forward_flops / flops,
        previous=previous,
    )
    for codec in codecs.all:
        for dtype in {sizes.dtype, sizes.reduced}:
            encode(codec, torch.zeros(1, dtype=dtype, device=stage.device))
    return codecs
