"""Errors in a run file, as sentences: the key's path, its value, and what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

_SHOWN_CHARACTERS = 80


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
            yield f"{_dotted(path)} = {_shown(problem['input'])}: {_wanted(problem)}"


def _unknown_key(path: list[Any], model: type[BaseModel]) -> str:
    known = sorted(_table(model, path[:-1]).model_fields)
    close = difflib.get_close_matches(str(path[-1]), known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"the keys are {', '.join(known)}"
    return f"{_dotted(path)}: unknown key; {hint}"


def _table(model: type[BaseModel], path: list[Any]) -> type[BaseModel]:
    for part in path:
        inner = model.model_fields[part].annotation
        assert isinstance(inner, type)
        assert issubclass(inner, BaseModel)
        model = inner
    return model


def _wanted(problem: Any) -> str:
    """What would be right, as the end of a sentence."""
    context = problem.get("ctx", {})
    match problem["type"]:
        case "value_error":
            return str(context["error"])
        case "literal_error":
            return f"must be one of {context['expected']}"
        case "greater_than_equal":
            return f"must be at least {context['ge']}"
        case "greater_than":
            return f"must be above {context['gt']}"
        case "less_than_equal":
            return f"must be at most {context['le']}"
        case "less_than":
            return f"must be below {context['lt']}"
        case "int_type" | "int_from_float":
            return "must be a whole number"
        case "float_type":
            return "must be a number"
        case "finite_number":
            return "must be a finite number"
        case "string_type":
            return "must be a string, in quotes"
        case "dict_type" | "model_type":
            return "must be a table"
        case "list_type":
            return "must be a list"
        case "string_pattern_mismatch":
            return "must be letters, digits, dots, dashes and underscores, and start with a letter or digit"
        case "string_too_short":
            return f"must have at least {context['min_length']} characters"
        case "string_too_long":
            return f"must have at most {context['max_length']} characters"
        case _:
            return str(problem["msg"])


def _dotted(path: list[Any]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".") or "the file"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."
