"""The model as the scheduler sees it: costs per layer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from dtfm.scheduler.model.memory import KEPT_PER_OUTPUT_BYTE, LADDER, Checkpointing, Keeping, OptimizerState

if TYPE_CHECKING:  # commands that read a log, or ask a coordinator, do not wait for it
    import numpy as np
    from numpy.typing import NDArray

UPDATE_BYTES = 0.5
"""Of Muon's updates, per byte of the parameters: 16 bits for 32. They lie on the device beside the gradients, and their owner
sends them to the other replicas. In return these parameters have one moment instead of two."""

Bytes = TypeVar("Bytes", float, "NDArray[np.float64]")


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. All numbers but the bytes of parameters are per micro-batch. The backward pass costs
    Workload.backward_per_forward times the forward."""

    name: str
    forward_flops: float
    parameter_bytes: float
    """Of the parameters that are trained."""
    activation_bytes: float
    """Of the layer's output."""
    kept_bytes: float | None = None
    """What the forward pass keeps for the backward pass, the layer's input included. None: KEPT_PER_OUTPUT_BYTE times the
    output."""
    working_bytes: float = 0.0
    """The most that either pass allocates for a while in addition."""
    frozen_bytes: float = 0.0
    """Of the weights that nobody trains, as nodes keep them on the device."""
    orthogonal_bytes: float = 0.0
    """Of the parameters that Muon updates: see UPDATE_BYTES."""

    @property
    def kept(self) -> float:
        return KEPT_PER_OUTPUT_BYTE * self.activation_bytes if self.kept_bytes is None else self.kept_bytes

    def __post_init__(self) -> None:
        for field in (
            "forward_flops",
            "parameter_bytes",
            "activation_bytes",
            "kept_bytes",
            "working_bytes",
            "frozen_bytes",
            "orthogonal_bytes",
        ):
            value = getattr(self, field)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"layer {self.name!r}: {field} is {value}; it must be a finite number, 0 or above")
        if self.orthogonal_bytes > self.parameter_bytes:
            raise ValueError(
                f"layer {self.name!r}: orthogonal_bytes is {self.orthogonal_bytes}; they are part of the parameter_bytes, which "
                f"are {self.parameter_bytes}"
            )


@dataclass(frozen=True, slots=True)
class PaperCosts:
    """The workload of the paper's cost model (arXiv 2206.01288, section 3).

    ``gradient_gigabytes`` is per stage. ``activation_gigabytes`` is per pipeline: the activations of all micro-batches of a step
    that cross one stage boundary on one route. A gigabyte is 1e9 bytes.
    """

    stages: int
    replicas: int
    gradient_gigabytes: float
    activation_gigabytes: float

    def __post_init__(self) -> None:
        for field in ("stages", "replicas"):
            value = getattr(self, field)
            if value < 1:
                raise ValueError(f"paper: {field} is {value}; it must be 1 or more")
        for field in ("gradient_gigabytes", "activation_gigabytes"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"paper: {field} is {value}; it must be a finite number, 0 or above")

    @property
    def exchanged(self) -> tuple[float, float]:
        """The bytes of two exchanges: a shard of the gradients in a group, and a pipeline's activations at a boundary."""
        return self.gradient_gigabytes * 1e9 / self.replicas, self.activation_gigabytes * 1e9


@dataclass(frozen=True, slots=True)
class Workload:
    """Layers in model order. A stage's output is the activation of its last layer.

    A node that holds a layer keeps its weights, gradients and optimizer state.
    """

    layers: tuple[Layer, ...]
    micro_batches: int
    backward_per_forward: float = 2.0
    """What a backward pass costs, in forward passes: one for the gradients of activations, and one for those of weights, unless
    these are frozen."""
    optimizer_bytes_per_parameter_byte: float = 2.0
    copy_bytes_per_parameter_byte: float = 0.0
    """The size of a second copy of the weights, in the precision of computing; 0 if the parameters have that precision."""
    momentum_bytes_per_parameter_byte: float = 0.0
    """The momentum of exchanges between islands, always in the host's memory. It belongs to the state."""
    outer_bytes_per_parameter_byte: float = 0.0
    """With rounds, what else exchanges between islands need, always in the host's memory. It is not moved with the state: see
    `with_rounds`."""
    sent_per_activation_byte: float = 1.0
    """Bytes on a link per byte of an activation, or of its gradient, under the codec."""
    sent_per_reduced_byte: float = 1.0
    """Bytes on a link per byte of the gradients that replicas reduce, under the codec."""
    sent_per_exchanged_byte: float = 1.0
    """Bytes on a link per byte that islands exchange, under the codec."""
    tries_outer_steps: bool = False
    """Exchanges try outer steps: meanwhile a node's own weights are in the host's memory."""
    islands_cost: float = 1.0
    """The extra tokens that several islands need in this run, as a multiple of what other runs have shown
    (cost/exchange.py). 1: this run has shown nothing."""
    exchanged_with_all: bool = False
    """An island sends its part to all holders, rather than pieces to the nodes that sum them up."""
    checkpointing: Checkpointing | None = Checkpointing.NONE
    """What every node does. None: the scheduler decides, node by node."""
    optimizer_state: OptimizerState | None = OptimizerState.DEVICE
    """Where every node keeps weights and moments. None: the scheduler decides, node by node."""
    paper: PaperCosts | None = None
    """The costs for the paper's objective, read by nothing else. None: not given."""
    tied: bool = False
    """The first and the last stage share parameters, so that all their nodes exchange gradients."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("layers is empty; a workload needs at least one")
        if self.micro_batches < 1:
            raise ValueError(f"micro_batches is {self.micro_batches}; it must be 1 or more")
        for field in (
            "backward_per_forward",
            "optimizer_bytes_per_parameter_byte",
            "copy_bytes_per_parameter_byte",
        ):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{field} is {value}; it must be a finite number, 0 or above")
        assert min(self.sent_per_activation_byte, self.sent_per_reduced_byte, self.sent_per_exchanged_byte) > 0

    def with_rounds(self) -> Workload:
        """The workload with rounds. Nodes then also keep the parameters of the last exchange. They keep what a sparse codec
        leaves out of that exchange and of the next, and their own parameters while they try outer steps."""
        kept = 3.0 if self.exchanged_with_all else 1.0
        return replace(self, outer_bytes_per_parameter_byte=kept + self.tries_outer_steps)

    @property
    def passes(self) -> float:
        """What a micro-batch costs, in forward passes, if no layer is computed again."""
        return 1.0 + self.backward_per_forward

    @property
    def ways(self) -> tuple[Keeping, ...]:
        """The ways to keep what a node needs that the workload allows, in the order of trying."""
        return tuple(
            keeping
            for keeping in LADDER
            if self.checkpointing in (None, keeping.checkpointing)
            and self.optimizer_state in (None, keeping.optimizer_state)
        )

    @property
    def bytes_kept_per_parameter_byte(self) -> float:
        """Memory that a replica needs if the state is on its device: weights, gradients, optimizer state, and the second copy
        of the weights to compute with, if any."""
        return 2.0 + self.optimizer_bytes_per_parameter_byte + self.copy_bytes_per_parameter_byte

    @property
    def bytes_beside_host_per_parameter_byte(self) -> float:
        """The device's memory that a replica needs if the state is in the host's memory: weights to compute with, and
        gradients."""
        return (self.copy_bytes_per_parameter_byte or 1.0) + 1.0

    def kept_on_device(self, parameters: Bytes, orthogonal: Bytes) -> Bytes:
        """The device's memory for layers whose state is there. ``parameters`` and ``orthogonal`` are the layers' bytes."""
        return parameters * self.bytes_kept_per_parameter_byte + orthogonal * (UPDATE_BYTES - 1)

    def kept_beside_host(self, parameters: Bytes, orthogonal: Bytes) -> Bytes:
        """The device's memory for layers whose state is in the host's."""
        return parameters * self.bytes_beside_host_per_parameter_byte + orthogonal * UPDATE_BYTES

    def kept_on_host(self, parameters: Bytes, orthogonal: Bytes) -> Bytes:
        """The host's memory for these layers."""
        return parameters * self.host_bytes_per_parameter_byte - orthogonal

    def moved(self, parameters: Bytes, orthogonal: Bytes) -> Bytes:
        """Bytes transferred to a node that takes over layers: weights, optimizer state, and the momentum of exchanges."""
        return parameters * self.bytes_moved_per_parameter_byte - orthogonal

    def least_on_device(self, parameters: Bytes, orthogonal: Bytes) -> Bytes:
        """The least that the state of one or more layers needs on any device, in any way that the workload allows."""
        if any(way.optimizer_state is OptimizerState.HOST for way in self.ways):  # it takes no more than the other
            return self.kept_beside_host(parameters, orthogonal)
        return self.kept_on_device(parameters, orthogonal)

    @property
    def host_bytes_per_parameter_byte(self) -> float:
        """The host's memory that the state needs there: weights in full precision, optimizer state, and what exchanges need."""
        return 1.0 + self.optimizer_bytes_per_parameter_byte + self.for_exchanges_per_parameter_byte

    @property
    def bytes_over_bus_per_parameter_byte(self) -> float:
        """What passes the host's bus each step if the state is in the host's memory: gradients, and weights to compute with."""
        return 1.0 + (self.copy_bytes_per_parameter_byte or 1.0)

    @property
    def bytes_moved_per_parameter_byte(self) -> float:
        """Bytes transferred to a node that takes over a layer: weights, optimizer state, and the momentum of exchanges."""
        return 1.0 + self.optimizer_bytes_per_parameter_byte + self.momentum_bytes_per_parameter_byte

    @property
    def bytes_shared_per_parameter_byte(self) -> float:
        """The part of the moved bytes that all islands share after an exchange: all but AdamW's moments."""
        return 1.0 + self.momentum_bytes_per_parameter_byte

    @property
    def for_exchanges_per_parameter_byte(self) -> float:
        """The host's memory that is for exchanges alone."""
        return self.momentum_bytes_per_parameter_byte + self.outer_bytes_per_parameter_byte
