"""GPUs that people rent: what is known of them without one at hand.

Memory is in GiB, as nvidia-smi reports it (with error correction where that is on by default). Speed is the peak of dense bf16
matrix products summed in 32 bits, in TFLOP/s, from NVIDIA's papers on the architectures (Volta, Turing, Ampere GA100 and GA102,
Ada, Hopper, Blackwell) and data sheets. Figures there "with sparsity" are halved; GeForce cards sum in 32 bits at half the speed
at which they sum in 16, and that half counts.
"""

from __future__ import annotations

from dataclasses import dataclass

SUSTAINED = 0.5
"""Fraction of the peak that training sustains: large models had 0.21 to 0.46 over many devices (Chowdhery et al. 2022, arXiv
2204.02311, table 3); a device that computes whole layers alone does better."""
RESERVED_GIB, RESERVED = 0.6, 0.03
"""Memory that no plan counts on: the driver's context and its libraries' kernels, and a fraction for fragmentation."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """``has_bf16`` is False where the peak is of fp32, because the device computes in no bf16."""

    name: str
    memory_gib: float
    peak_tflops: float
    has_bf16: bool = True

    @property
    def flops(self) -> float:
        """Sustained FLOP/s."""
        return SUSTAINED * self.peak_tflops * 1e12

    @property
    def memory_bytes(self) -> float:
        """Bytes that a plan may count on."""
        return (self.memory_gib * (1 - RESERVED) - RESERVED_GIB) * 2**30


GPUS = (
    Gpu("RTX 3060", 12, 25.5),
    Gpu("RTX 3060 Ti", 8, 32.4),
    Gpu("RTX 3070", 8, 40.6),
    Gpu("RTX 3070 Ti", 8, 43.5),
    Gpu("RTX 3080", 10, 59.5),
    Gpu("RTX 3080 Ti", 12, 68.2),
    Gpu("RTX 3090", 24, 71.0),
    Gpu("RTX 3090 Ti", 24, 80.0),
    Gpu("RTX 4060 Ti", 16, 44.1),
    Gpu("RTX 4070", 12, 58.3),
    Gpu("RTX 4070 Ti", 12, 80.2),
    Gpu("RTX 4080", 16, 97.5),
    Gpu("RTX 4080 SUPER", 16, 104.4),
    Gpu("RTX 4090", 24, 165.2),
    Gpu("RTX 5070 Ti", 16, 87.9),
    Gpu("RTX 5080", 16, 112.6),
    Gpu("RTX 5090", 32, 209.5),
    Gpu("RTX A4000", 16, 76.7),
    Gpu("RTX A4500", 20, 94.6),
    Gpu("RTX A5000", 24, 111.1),
    Gpu("RTX A6000", 48, 154.8),
    Gpu("RTX 4000 Ada", 20, 106.9),
    Gpu("RTX 5000 Ada", 32, 261.1),
    Gpu("RTX 6000 Ada", 48, 364.2),
    Gpu("RTX PRO 6000", 96, 503.8),
    Gpu("T4", 15, 8.1, has_bf16=False),
    Gpu("V100 16GB", 16, 15.7, has_bf16=False),
    Gpu("V100 32GB", 32, 15.7, has_bf16=False),
    Gpu("A10", 22.5, 125.0),
    Gpu("A30", 24, 165.0),
    Gpu("A40", 45, 149.7),
    Gpu("L4", 22.5, 121.0),
    Gpu("L40", 45, 181.0),
    Gpu("L40S", 45, 362.0),
    Gpu("A100 40GB", 40, 312.0),
    Gpu("A100 80GB", 80, 312.0),
    Gpu("H100 PCIe", 79.6, 756.0),
    Gpu("H100 SXM", 79.6, 989.4),
    Gpu("H100 NVL", 93.6, 835.5),
    Gpu("H200", 140.4, 989.4),
    Gpu("B200", 179, 2250.0),
)
