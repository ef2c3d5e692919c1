"""What a step sends to the neighbouring stages: its outputs forward, and their gradients back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from dtfm.kernels.codec import Codec, Encoded, encoded_bytes
from dtfm.node.model.placement import Placement
from dtfm.node.training.codec_choice import Codecs
from dtfm.node.training.step.progress import Progress
from dtfm.node.transport.frame_validation import TensorSizes
from dtfm.node.transport.sender import What
from dtfm.protos.frame import Kind


@dataclass(frozen=True, slots=True)
class Outgoing:
    """The tensors of one step."""

    placement: Placement
    progress: Progress
    codecs: Codecs
    sizes: TensorSizes
    neighbours_have: Mapping[Kind, Collection[int]]
    """By kind, the micro-batches whose tensor the neighbours have from an earlier generation."""
    encode: Callable[[What, torch.Tensor, Codec], Future[Encoded]]
    """See Sender.encode."""
    send: Callable[[str, What, Future[Encoded]], None]
    """See Sender.send."""

    def hand_on(self, kind: Kind, destination: str, number: int, tensor: torch.Tensor) -> None:
        """Keeps a tensor for another attempt, and sends it unless the neighbour has it."""
        codec, what = self.codecs.of(kind, destination), self._what(kind, number)
        encoded = self.encode(what, tensor, codec)
        # First, as sending may be called off.
        self.progress.keep(kind, number, encoded, encoded_bytes(codec, tensor.numel(), tensor.dtype))
        if number not in self.neighbours_have.get(kind, ()):
            self.send(destination, what, encoded)

    def send_again(self) -> None:
        """Sends tensors that were computed here in an earlier generation and that the neighbours lack."""
        for (kind, number), encoded in sorted(self.progress.sent.items(), key=lambda item: item[0]):
            towards = self.placement.next if kind is Kind.ACTIVATION else self.placement.previous
            destination = towards.get(number)
            if destination is not None and number not in self.neighbours_have.get(kind, ()):
                self.send(destination, self._what(kind, number), encoded)

    def _what(self, kind: Kind, number: int) -> What:
        elements = self.sizes.input if kind is Kind.GRADIENT else self.sizes.output
        at = (self.placement.generation, self.progress.step, number, 0)
        return What(kind, *at, elements, self.sizes.dtype)
