"""How the scheduler's loops are compiled.

The compiled code is kept beside each file, or elsewhere (dtfm/compiled_code.py). So only a machine's first call compiles, for
some seconds. Compiled functions release the GIL, so that several threads run them at the same time.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba import types
from numba.core.dispatcher import Dispatcher
from numba.core.registry import CPUDispatcher

from dtfm.compiled_code import find_room

find_room()
_config: Any = numba.config
_config.OPT = type(_config.OPT)(2)  # LLVM's third level takes 4 % longer to compile, and finds plans no sooner
_njit: Any = numba.njit  # its types do not know all options
_F = TypeVar("_F", bound=Callable[..., Any])
_NUMBERS = {"int", "float", "bool", "None", "tuple", "Need"}
"""The names in the annotation of a function that returns no arrays."""


def compiled(*, makes_arrays: bool = False) -> Callable[[_F], _F]:
    """For a function that only other compiled functions call. It is compiled when it is first called, once for all argument types
    that it is given.

    ``makes_arrays``: whether it makes arrays (a slice is one), returns them, or gets them from a function that it calls. In all
    other functions Numba counts no references to arrays, which takes less time to compile.
    """
    return _compiler(makes_arrays=makes_arrays, from_python=False)


def entry(*, makes_arrays: bool = False) -> Callable[[_F], _F]:
    """Like `compiled`, for a function that Python calls as well: it also gets a wrapper, which takes time to compile."""
    return _compiler(makes_arrays=makes_arrays, from_python=True)


def _compiler(*, makes_arrays: bool, from_python: bool) -> Callable[[_F], _F]:
    """Numba checks a cached function only against its own file. But the compiled code contains the code of the functions that it
    calls. So here the cache also depends on the files of those functions: the files of all compiled functions that the
    function's module has imported or defined so far."""

    def compile_later(function: _F) -> _F:
        made = _njit(
            nogil=True,
            cache=True,
            error_model="numpy",
            no_cfunc_wrapper=True,
            no_cpython_wrapper=not from_python,
            _nrt=makes_arrays,  # Numba refuses a function that makes arrays without it
        )(function)
        known = {name: value for name, value in function.__globals__.items() if isinstance(value, Dispatcher)}
        called = [known[name].py_func for name in function.__code__.co_names if name in known]
        assert makes_arrays or not any(map(_returns_arrays, (function, *called))), function.__qualname__
        if not from_python:
            made.__class__ = _Inner
        call_template = made.get_call_template

        def called_with_any(args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            """Numba would compile the function again for each literal among its arguments. It sees their types alone."""
            return call_template(
                tuple(map(types.unliteral, args)), dict(zip(named, map(types.unliteral, named.values()), strict=True))
            )

        made.get_call_template = called_with_any
        stamps = {repr(_cache_file(each)._source_stamp) for each in (made, *known.values())}
        _cache_file(made)._source_stamp = hashlib.sha256("".join(sorted(stamps)).encode()).digest()
        return cast(_F, made)

    return compile_later


class _Inner(CPUDispatcher):
    """Refuses calls from Python, for which there is no wrapper: they would end the process."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"only compiled functions call {self.py_func.__qualname__}; for others it must be an entry")


def _returns_arrays(function: Callable[..., Any]) -> bool:
    """By its annotation, which is a string."""
    return not set(re.findall(r"\w+", str(function.__annotations__.get("return")))) <= _NUMBERS


def _cache_file(function: Any) -> Any:
    return function._cache._cache_file
