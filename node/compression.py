"""Which codec each of this node's streams uses: decided once per generation, from what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dtfm.kernels.codec import Codec, codec_named, encoded_bytes
from dtfm.node.share import Group, Share
from dtfm.protos.frame import Kind
from dtfm.protos.plan_pb2 import Run

GENTLEST_FIRST = (Codec.OFF, Codec.RAW16, Codec.I8B256)
"""What "auto" chooses from; gradients are never taken under 8 bits unasked."""


@dataclass(frozen=True, slots=True)
class Codecs:
    """By destination. ``reduction`` is one for all: members of a group must decode the same bytes."""

    activations: Mapping[str, Codec]
    gradients: Mapping[str, Codec]
    reduction: Codec

    @property
    def all(self) -> set[Codec]:
        return {*self.activations.values(), *self.gradients.values(), self.reduction}

    @property
    def sentence(self) -> str:
        """For people: what goes where under which codec."""
        links = [f"activations to {peer} {codec.name.lower()}" for peer, codec in sorted(self.activations.items())]
        links += [f"gradients to {peer} {codec.name.lower()}" for peer, codec in sorted(self.gradients.items())]
        return ", ".join([*links, f"reduction {self.reduction.name.lower()}"])

    def of(self, kind: Kind, destination: str) -> Codec:
        match kind:
            case Kind.ACTIVATION | Kind.EVALUATION:
                return self.activations[destination]
            case Kind.GRADIENT:
                return self.gradients[destination]
            case _:
                return self.reduction


def choose_codec(setting: str, elements: int, dtype: torch.dtype, bandwidth: float, seconds: float) -> Codec:
    """The codec that the run file names, or for "auto" the gentlest under which ``elements`` elements cross a link of
    ``bandwidth`` bytes per second within ``seconds``, the compute time that the transfer can hide under."""
    if setting != "auto":
        return codec_named(setting)
    for codec in GENTLEST_FIRST:
        if encoded_bytes(codec, elements, dtype) / bandwidth <= seconds:
            return codec
    return GENTLEST_FIRST[-1]


def choose_codecs(
    network: Run.Network,
    share: Share,
    groups: Mapping[int, Group],
    bucket_elements: Mapping[int, int],
    *,
    input_elements: int,
    output_elements: int,
    dtype: torch.dtype,
    bandwidth: Mapping[str, float],
    micro_batch_seconds: float,
) -> Codecs:
    """For all of a node's streams in one generation.

    ``bandwidth`` is that of the links from this node, by destination, in bytes per second; one that is not known counts as
    fast. ``micro_batch_seconds`` is what forward and backward of a micro-batch take here.
    """

    def for_peers(setting: str, elements: int, peers: set[str]) -> dict[str, Codec]:
        return {
            peer: choose_codec(setting, elements, dtype, bandwidth.get(peer, float("inf")), micro_batch_seconds)
            for peer in peers
        }

    # A member sends each of the others its share of their shard, and its own shard's sum.
    sent = sum(2 * size * (len(groups[i].members) - 1) // len(groups[i].members) for i, size in bucket_elements.items())
    members = {m for group in groups.values() for m in group.members} - {share.node}
    slowest = min((bandwidth.get(member, float("inf")) for member in members), default=float("inf"))
    step_seconds = micro_batch_seconds * len(share.micro_batches)
    return Codecs(
        activations=for_peers(
            network.activations, output_elements, {*share.next.values(), *share.evaluation_next.values()}
        ),
        gradients=for_peers(network.gradients, input_elements, set(share.previous.values())),
        reduction=choose_codec(network.reduction, sent, dtype, slowest, step_seconds),
    )
