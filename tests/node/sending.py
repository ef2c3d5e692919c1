"""A tensor from one node to another, as the pipeline sends it."""

from __future__ import annotations

import torch

from dtfm.kernels.codec import Codec
from dtfm.node.transport.sender import Sender, What


def send(sender: Sender, destination: str, what: What, tensor: torch.Tensor) -> None:
    sender.send(destination, what, sender.encode(what, tensor, Codec.OFF), tensor.numel(), tensor.dtype)
