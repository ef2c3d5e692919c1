"""Environments that make PyTorch and its libraries compute as on older processors, so that sums are taken in another order."""

TORCH_AS_ON_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
"""Takes AMX from oneDNN too. With AMX in oneDNN, PyTorch's attention in bf16 would rely on AMX, and fail."""
AS_ON_AVX2 = {**TORCH_AS_ON_AVX2, "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
AS_ON_SSE4 = {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"}
