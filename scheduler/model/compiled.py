"""How the scheduler's loops are compiled.

The compiled code is kept beside each file, or elsewhere (dtfm/compiled_code.py). So only a machine's first call compiles, for
some seconds. Compiled functions release the GIL, so that several threads run them at the same time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba import types
from numba.core.dispatcher import Dispatcher

from dtfm.compiled_code import find_room

find_room()
_config: Any = numba.config
_config.OPT = type(_config.OPT)(2)  # LLVM's third level takes 4 % longer to compile, and finds plans no sooner
_njit: Any = numba.njit  # its types do not know no_cfunc_wrapper
_F = TypeVar("_F", bound=Callable[..., Any])


def compiled(function: _F) -> _F:
    """``function``, compiled when it is first called, once for all argument types that it is given.

    Numba checks a cached function only against its own file. But the compiled code contains the code of the functions that it
    calls. So here the cache also depends on the files of those functions: the files of all compiled functions that the
    function's module has imported or defined so far.
    """
    made = _njit(nogil=True, cache=True, error_model="numpy", no_cfunc_wrapper=True)(function)
    called = made.get_call_template

    def called_with_any(args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Numba would compile the function again for each literal among its arguments. It sees their types alone."""
        return called(
            tuple(map(types.unliteral, args)), dict(zip(named, map(types.unliteral, named.values()), strict=True))
        )

    made.get_call_template = called_with_any
    known = [value for value in function.__globals__.values() if isinstance(value, Dispatcher)]
    stamps = {repr(_cache_file(each)._source_stamp) for each in (made, *known)}
    _cache_file(made)._source_stamp = hashlib.sha256("".join(sorted(stamps)).encode()).digest()
    return cast(_F, made)


def _cache_file(function: Any) -> Any:
    return function._cache._cache_file
