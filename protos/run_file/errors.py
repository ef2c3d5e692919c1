"""Errors in a run file, as sentences: the key's path, its value, and what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from dtfm.protos.run_file.table import table_of

_SHOWN_CHARACTERS = 80

_WANTED = {
    "value_error": "{error}",
    "missing": "must be given",
    "literal_error": "must be one of {expected}",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be a string, in quotes",
    "dict_type": "must be a table",
    "model_type": "must be a table",
    "list_type": "must be a list",
    "string_pattern_mismatch": "must be letters, digits, dots, dashes and underscores, and start with a letter or digit",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
}
"""By pydantic's type of a problem. Others are told in its own words."""


class RunFileError(ValueError):
    """The run file cannot be used; the message has one line for each wrong key."""


def describe_errors(error: ValidationError, model: type[BaseModel]) -> str:
    """All problems of ``error``, a validation of ``model``: a count, then one line each."""
    lines = list(dict.fromkeys(_lines(error, model)))
    return f"{len(lines)} problem{'s' if len(lines) > 1 else ''}:\n" + "\n".join(f"  {line}" for line in lines)


def _lines(error: ValidationError, model: type[BaseModel]) -> Iterator[str]:
    for problem in error.errors(include_url=False):
        path = list(problem["loc"])
        if problem["type"] == "default_factory_not_called":
            continue  # the default follows from a key that has an error of its own
        if problem["type"] == "extra_forbidden":
            yield _unknown_key(path, model)
        else:
            shown = "(hidden)" if path[:1] == ["notify"] else _shown(problem["input"])
            yield f"{_dotted(path)} = {shown}: {_wanted(problem)}"


def _unknown_key(path: list[Any], model: type[BaseModel]) -> str:
    table: Any = model
    for part in path[:-1]:
        if isinstance(part, int):
            table = get_args(table)[0]
        else:
            field = table.model_fields[part]
            table = table_of(field) or field.annotation
    known = sorted(table.model_fields)
    close = difflib.get_close_matches(str(path[-1]), known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"the keys are {', '.join(known)}"
    return f"{_dotted(path)}: unknown key; {hint}"


def _wanted(problem: Any) -> str:
    """What would be right, as the end of a sentence."""
    wanted = _WANTED.get(problem["type"])
    return wanted.format(**problem.get("ctx", {})) if wanted is not None else str(problem["msg"])


def _dotted(path: list[Any]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".") or "the file"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."
