"""A tensor from one node to another, as the pipeline sends it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from dtfm.kernels.codec import Codec
from dtfm.node.transport.sender import Sender, What
from dtfm.protos.frame import Kind

activation = partial(What, Kind.ACTIVATION, part=0, elements=0, dtype=torch.float32)
"""activation(generation, step, index), to be given to ``send``."""


def send(sender: Sender, destination: str, what: What, tensor: torch.Tensor) -> None:
    what = replace(what, elements=tensor.numel(), dtype=tensor.dtype)
    sender.send(destination, what, sender.encode(what, tensor, Codec.OFF))
