"""Which codec each of this node's streams uses: decided between steps, from what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dtfm.kernels.codec import Codec, codec_named, encoded_bytes
from dtfm.node.model.placement import Group, Share
from dtfm.protos.control_pb2 import LinkCodec
from dtfm.protos.frame import Kind
from dtfm.protos.plan_pb2 import Run

GENTLEST_FIRST = (Codec.OFF, Codec.RAW16, Codec.I8B256)
"""What "auto" chooses from; gradients are never taken under 8 bits unasked."""

EXPOSED = 0.02
"""So large a part of a step's computing a reduction may take beside what hides it: not worth losing bits for."""

MARGIN = 1.25
"""A codec is left for another only where that is right by so much: measured bandwidths that lie less apart change nothing."""


@dataclass(frozen=True, slots=True)
class Codecs:
    """By destination. ``reduction`` is one for all ``replicas``: members of a group must decode the same bytes."""

    activations: Mapping[str, Codec]
    gradients: Mapping[str, Codec]
    reduction: Codec
    replicas: frozenset[str]

    @property
    def all(self) -> set[Codec]:
        return {*self.activations.values(), *self.gradients.values(), self.reduction}

    @property
    def told(self) -> list[LinkCodec]:
        """What goes where under which codec, as the coordinator is told."""
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

    @property
    def sentence(self) -> str:
        """``told``, for people."""
        return (
            ", ".join(f"{link.tensors} to {link.destination} {link.codec}" for link in self.told) or "nothing is sent"
        )

    def of(self, kind: Kind, destination: str) -> Codec:
        match kind:
            case Kind.ACTIVATION | Kind.EVALUATION:
                return self.activations[destination]
            case Kind.GRADIENT:
                return self.gradients[destination]
            case _:
                return self.reduction


def choose_codec(
    setting: str, elements: int, dtype: torch.dtype, bandwidth: float, seconds: float, previous: Codec | None = None
) -> Codec:
    """The codec that the run file names, or for "auto" the gentlest under which ``elements`` elements cross a link of
    ``bandwidth`` bytes per second within ``seconds``, the compute time that the transfer can hide under. That is the
    ``previous`` one still where a bandwidth within MARGIN of this one would have it so."""
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
    share: Share,
    groups: Mapping[int, Group],
    bucket_elements: Mapping[int, int],
    *,
    input_elements: int,
    output_elements: int,
    dtype: torch.dtype,
    bandwidth: Mapping[str, float],
    micro_batch_seconds: float,
    previous: Codecs | None,
) -> Codecs:
    """For all of a node's streams.

    ``bandwidth`` is that of the links from this node, by destination, in bytes per second; one that is not known counts as
    fast. ``micro_batch_seconds`` is what forward and backward of a micro-batch take here. ``previous`` is what was chosen
    before, be it under another plan.
    """

    def for_peers(setting: str, elements: int, peers: set[str], before: Mapping[str, Codec]) -> dict[str, Codec]:
        return {
            peer: choose_codec(
                setting, elements, dtype, bandwidth.get(peer, float("inf")), micro_batch_seconds, before.get(peer)
            )
            for peer in peers
        }

    # A member sends each of the others its share of their shard, and its own shard's sum; nothing is final before the last
    # backward, so that is all it can hide under.
    sent = sum(2 * size * (len(groups[i].members) - 1) // len(groups[i].members) for i, size in bucket_elements.items())
    members = {m for group in groups.values() for m in group.members} - {share.node}
    slowest = min((bandwidth.get(member, float("inf")) for member in members), default=float("inf"))
    last_backward, all_computing = micro_batch_seconds * 2 / 3, micro_batch_seconds * len(share.micro_batches)
    unnoticed = last_backward + EXPOSED * all_computing
    return Codecs(
        activations=for_peers(
            network.activations,
            output_elements,
            {*share.next.values(), *share.evaluation_next.values()},
            previous.activations if previous else {},
        ),
        gradients=for_peers(
            network.gradients,
            input_elements,
            set(share.previous.values()),
            previous.gradients if previous else {},
        ),
        reduction=choose_codec(
            network.reduction, sent, dtype, slowest, unnoticed, previous.reduction if previous else None
        ),
        replicas=frozenset(members),
    )
