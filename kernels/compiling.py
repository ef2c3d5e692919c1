"""How loops are compiled by Numba, and the types of their arrays.

The compiled code is kept beside the source file, or elsewhere (dtfm/compiled_code.py), so only a machine's first import compiles,
for a few seconds. The cache contains layout.py's numbers, and the loops of other files that a loop calls: touch a file after
changing them. The loops release the GIL, write into the caller's arrays, and round every operation to float32 separately: Numba
fuses no multiply-adds without ``fastmath``.

Two habits keep loops vectorised, which doubles their speed. Sizes that could be constants are arguments computed as
min(32, x.size), which is always 32: the compiler would unroll short loops of a known length instead of vectorising them. Indices
are unsigned: signed ones need a check for counting from the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from dtfm.compiled_code import find_room
from dtfm.kernels.layout import BF16_INFINITY, BLOCKS, SMALLEST, Codec

find_room()

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
U32 = NDArray[np.uint32]
U16 = NDArray[np.uint16]
U8 = NDArray[np.uint8]
Index = np.uintp

f32, u16, u8 = types.float32[::1], types.uint16[::1], types.uint8[::1]
f32_in, u16_in, u8_in = (types.Array(a.dtype, 1, "C", readonly=True) for a in (f32, u16, u8))

ABS = np.uint32(0x7FFFFFFF)
HALF = np.uint32(16)
ZERO = np.float32(0)
CEILING = np.uint32(BF16_INFINITY)
FLOOR = np.uint32(SMALLEST)
LEVELS_8 = np.float32(BLOCKS[Codec.I8B256].levels)
# Adding and subtracting 1.5 * 2^23 rounds small numbers to integers, halves to even, and unlike rint it vectorises.
ROUND = np.float32(12582912)

_njit: Any = numba.njit  # its types do not know no_cfunc_wrapper
_F = TypeVar("_F", bound=Callable[..., Any])


def compiled(signature: Any = None) -> Callable[[_F], _F]:
    compiler: Callable[[_F], _F] = _njit(signature, nogil=True, cache=True, error_model="numpy", no_cfunc_wrapper=True)
    return compiler


def _of_word(build: Callable[[Any, Any, Any], Any]) -> Any:
    """A function of an unsigned 32-bit integer for compiled loops. ``build`` makes LLVM's instruction."""

    def typed(_: Any, word: Any) -> Any:
        return types.uint32(types.uint32), lambda context, builder, _, arguments: build(context, builder, arguments[0])

    return intrinsic(typed)


count_ones = _of_word(lambda _, builder, word: builder.ctpop(word))
lowest_one = _of_word(lambda context, builder, word: builder.cttz(word, context.get_constant(types.boolean, 0)))
"""The place of the lowest bit that is set; 32 if there is none."""
