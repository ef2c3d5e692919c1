"""Fields of a JSON document, each of which is what it should be, or a ValueError names it."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from typing import Any


def read_document(text: str, keys: set[str], optional: Collection[str] = ()) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    check_keys(document, "", keys, optional)
    return dict(document)


def check_keys(entry: object, path: str, keys: set[str], optional: Collection[str] = ()) -> None:
    if not isinstance(entry, dict):
        raise ValueError(
            f"{path or 'the document'} is {entry!r:.80}; it must be an object with {', '.join(sorted(keys))}"
        )
    for key in entry:
        if key not in keys and key not in optional:
            raise ValueError(f"{path_of(path, key)} is unknown; the keys are {', '.join(sorted(keys))}")


def path_of(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def value_of(entry: dict[str, Any], key: str, path: str) -> Any:
    if key not in entry:
        raise ValueError(f"{path_of(path, key)} is missing")
    return entry[key]


def list_of(entry: dict[str, Any], key: str, path: str) -> list[Any]:
    value = value_of(entry, key, path)
    if not isinstance(value, list):
        raise ValueError(f"{path_of(path, key)} is {value!r:.80}; it must be a list")
    return value


def text_of(entry: dict[str, Any], key: str, path: str) -> str:
    value = value_of(entry, key, path)
    if not isinstance(value, str):
        raise ValueError(f"{path_of(path, key)} is {value!r:.80}; it must be a text")
    return value


def ids_of(entry: dict[str, Any], key: str, path: str) -> tuple[str, ...]:
    values = list_of(entry, key, path)
    for index, value in enumerate(values):
        if not isinstance(value, str):
            raise ValueError(f"{path_of(path, key)}[{index}] is {value!r:.80}; it must be a node's id")
    return tuple(values)


def number_of(entry: dict[str, Any], key: str, path: str) -> float:
    value = value_of(entry, key, path)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{path_of(path, key)} is {value!r:.80}; it must be a finite number")
    return float(value)


def integer_of(entry: dict[str, Any], key: str, path: str) -> int:
    return whole_number(value_of(entry, key, path), path_of(path, key))


def whole_number(value: Any, path: str) -> int:
    if type(value) is not int or not 0 <= value < 2**53:
        raise ValueError(f"{path} is {value!r:.80}; it must be a whole number, 0 or above")
    return value
