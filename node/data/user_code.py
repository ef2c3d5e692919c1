"""Code that a run names, if this node's operator allows it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any


def import_allowed(path: str, allowed_modules: Sequence[str], field: str) -> Callable[[], Any]:
    """The function named ``path``, "package.module:function".

    Raises:
        ValueError: malformed, not allowed, or missing; the message begins with ``field``.
    """
    module_name, _, function_name = path.partition(":")
    if not (all(part.isidentifier() for part in module_name.split(".")) and function_name.isidentifier()):
        raise ValueError(f"{field}: {path!r} is not of the form package.module:function")
    if path not in allowed_modules and module_name not in allowed_modules:
        raise ValueError(
            f"{field}: this node does not run code from {path!r}; to allow it, start the node with --allow-module {module_name}"
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as problem:  # whatever the user's module raises
        raise ValueError(
            f"{field}: {module_name!r} cannot be imported ({type(problem).__name__}: {problem}); install it on this node"
        ) from problem
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"{field}: module {module_name!r} has no function {function_name!r}")
    return function  # type: ignore[no-any-return]
