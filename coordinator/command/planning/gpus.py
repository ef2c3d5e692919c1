"""GPUs that people rent: their known figures, without a GPU at hand.

Memory is in GiB, as nvidia-smi reports it (with error correction if that is on by default). Speeds are the peaks of dense
matrix products in fp32 and in bf16 summed in 32 bits, in TFLOP/s. They are from NVIDIA's data sheets and papers on the
architectures (Volta, Turing, Ampere GA100 and GA102, Ada, Hopper, Blackwell). Figures there "with sparsity" are halved.

GeForce cards sum bf16 in 32 bits at half the speed of summing in 16 bits; the half counts. The speed in fp32 is without tensor
cores. With tensor cores products are of TF32, with 10 bits of each number's mantissa. PyTorch uses TF32 only when told to, and
nodes do not tell it. In fp64, tensor cores count if there are any for fp64. The same papers say how many times slower than fp32
it is.
"""

from __future__ import annotations

from dataclasses import dataclass

SUSTAINED = 0.5
"""Fraction of the peak that training sustains. Large models had 0.21 to 0.46 over many devices (Chowdhery et al. 2022, arXiv
2204.02311, table 3). A device that computes whole layers alone has more."""
RESERVED_GIB, RESERVED = 0.6, 0.03
"""Memory that no plan counts on: the driver's context and its libraries' kernels, and a fraction for fragmentation."""
HOST_MEMORY = "32GiB"
"""A node's host memory by default: little, because not every landlord gives a rented GPU its share of a large machine."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """``bf16_tflops`` is None if the device cannot compute in bf16: a run in bf16 computes in fp32 there. ``fp64_slower``: how
    many times slower it computes in fp64 than in fp32."""

    name: str
    memory_gib: float
    fp32_tflops: float
    bf16_tflops: float | None = None
    fp64_slower: float = 64

    def flops(self, precision: str) -> float:
        """Sustained FLOP/s of a run that computes in "fp32", "bf16" or "fp64"."""
        peak = self.fp32_tflops
        if precision == "fp64":
            peak /= self.fp64_slower
        elif precision == "bf16" and self.bf16_tflops is not None:
            peak = self.bf16_tflops
        return SUSTAINED * peak * 1e12

    @property
    def memory_bytes(self) -> float:
        """Bytes that a plan may count on."""
        return (self.memory_gib * (1 - RESERVED) - RESERVED_GIB) * 2**30


GPUS = (
    Gpu("RTX 3060", 12, 12.7, 25.5),
    Gpu("RTX 3060 Ti", 8, 16.2, 32.4),
    Gpu("RTX 3070", 8, 20.3, 40.6),
    Gpu("RTX 3070 Ti", 8, 21.7, 43.5),
    Gpu("RTX 3080", 10, 29.8, 59.5),
    Gpu("RTX 3080 Ti", 12, 34.1, 68.2),
    Gpu("RTX 3090", 24, 35.6, 71.0),
    Gpu("RTX 3090 Ti", 24, 40.0, 80.0),
    Gpu("RTX 4060 Ti", 16, 22.1, 44.1),
    Gpu("RTX 4070", 12, 29.1, 58.3),
    Gpu("RTX 4070 Ti", 12, 40.1, 80.2),
    Gpu("RTX 4080", 16, 48.7, 97.5),
    Gpu("RTX 4080 SUPER", 16, 52.2, 104.4),
    Gpu("RTX 4090", 24, 82.6, 165.2),
    Gpu("RTX 5070 Ti", 16, 43.9, 87.9),
    Gpu("RTX 5080", 16, 56.3, 112.6),
    Gpu("RTX 5090", 32, 104.8, 209.5),
    Gpu("RTX A4000", 16, 19.2, 76.7),
    Gpu("RTX A4500", 20, 23.7, 94.6),
    Gpu("RTX A5000", 24, 27.8, 111.1),
    Gpu("RTX A6000", 48, 38.7, 154.8),
    Gpu("RTX 4000 Ada", 20, 26.7, 106.9),
    Gpu("RTX 5000 Ada", 32, 65.3, 261.1),
    Gpu("RTX 6000 Ada", 48, 91.1, 364.2),
    Gpu("RTX PRO 6000", 96, 126.0, 503.8),
    Gpu("T4", 15, 8.1, fp64_slower=32),
    Gpu("V100 16GB", 16, 15.7, fp64_slower=2),
    Gpu("V100 32GB", 32, 15.7, fp64_slower=2),
    Gpu("A10", 22.5, 31.2, 125.0),
    Gpu("A30", 24, 10.3, 165.0, fp64_slower=1),
    Gpu("A40", 45, 37.4, 149.7),
    Gpu("L4", 22.5, 30.3, 121.0),
    Gpu("L40", 45, 90.5, 181.0),
    Gpu("L40S", 45, 91.6, 362.0),
    Gpu("A100 40GB", 40, 19.5, 312.0, fp64_slower=1),
    Gpu("A100 80GB", 80, 19.5, 312.0, fp64_slower=1),
    Gpu("H100 PCIe", 79.6, 51.2, 756.0, fp64_slower=1),
    Gpu("H100 SXM", 79.6, 66.9, 989.4, fp64_slower=1),
    Gpu("H100 NVL", 93.6, 60.0, 835.5, fp64_slower=1),
    Gpu("H200", 140.4, 66.9, 989.4, fp64_slower=1),
    Gpu("B200", 179, 75.0, 2250.0, fp64_slower=2),
)
