"""The GPU's kernels compile for every kind of GPU that dtfm supports: by NVRTC, as CuPy does it, which needs no GPU."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels.gpu_module import gpu_with

ARCHITECTURES = [75, 90, 120, *(pytest.param(number, marks=pytest.mark.soak) for number in (80, 86, 89, 100))]
AS_CUPY = ("-ftz=true",)
"""The options that CuPy adds to its caller's."""


class Nvrtc:
    """NVIDIA's compiler, from the package nvidia-cuda-nvrtc."""

    def __init__(self) -> None:
        files = metadata.files("nvidia-cuda-nvrtc") or []
        (found,) = [file for file in files if file.name.startswith("libnvrtc.so.")]
        # NVRTC loads its builtins by name, and before 13.1 it does not look beside itself.
        for builtins in (file for file in files if file.name.startswith("libnvrtc-builtins.so.")):
            ctypes.CDLL(str(builtins.locate()))
        self._library = ctypes.CDLL(str(found.locate()))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def compile(self, text: str, options: tuple[str, ...]) -> bytes:
        """The machine code of ``text``. Raises RuntimeError with the compiler's log."""
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), text.encode(), b"kernels.cu", 0, None, None)
        try:
            flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            try:
                self._call("nvrtcCompileProgram", program, len(options), flags)
            except RuntimeError as error:
                raise RuntimeError(f"{error}\n{self._output(program, 'ProgramLog').decode()}") from None
            return self._output(program, "CUBIN")
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _output(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        output = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, output)
        return output.raw

    def _call(self, function: str, *arguments: Any) -> None:
        result = getattr(self._library, function)(*arguments)
        if result:
            raise RuntimeError(f"{function}: {self._library.nvrtcGetErrorString(result).decode()}")


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    return Nvrtc()


class Asked:
    """Stands in for CuPy's RawModule: the source and options that kernels/gpu.py compiles, and the kernels that it loads."""

    def __init__(self, code: str, options: tuple[str, ...]) -> None:
        self.code, self.options = code, options
        self.kernels: set[str] = set()

    def get_function(self, name: str) -> None:
        self.kernels.add(name)


def asked_for(file: str) -> Asked:
    """The compilations that kernels/gpu.py asks for with this file."""
    cupy = SimpleNamespace(RawModule=Asked, cuda=SimpleNamespace(Device=nullcontext))
    with gpu_with(cupy) as gpu:
        gpu.prepare(torch.device("cuda", 0))
        made: Asked = gpu._module(file)
        return made


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("file", "kernels"),
    [("codecs.cu", 2 * 2 * 3), pytest.param("sparse.cu", 2 * 2 * 2, marks=pytest.mark.soak), ("digest.cu", 2)],
)
def test_compiles_every_kernel(nvrtc: Nvrtc, file: str, kernels: int, architecture: int) -> None:
    asked = asked_for(file)
    code = nvrtc.compile(asked.code, (*asked.options, *AS_CUPY, f"-arch=sm_{architecture}"))
    assert len(asked.kernels) == kernels
    assert {kernel for kernel in asked.kernels if f".text.{kernel}\0".encode() in code} == asked.kernels


def test_a_mistake_is_shown_with_the_compilers_words(nvrtc: Nvrtc) -> None:
    asked = asked_for("codecs.cu")
    broken = asked.code + "\n__device__ int broken() { return undefined_name; }\n"
    with pytest.raises(RuntimeError, match='identifier "undefined_name" is undefined'):
        nvrtc.compile(broken, (*asked.options, "-arch=sm_90"))
