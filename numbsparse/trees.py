"""Tuples, lists and dicts of values, within each other: what steps and functions take and give."""

from collections.abc import Callable
from typing import Any


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """The same tuples, lists and dicts with `function` of what they hold, in order.

    >>> mapped({"a": (1, [2, 3])}, float)
    {'a': (1.0, [2.0, 3.0])}
    """
    if isinstance(value, list | tuple):
        items = [mapped(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: mapped(item, function) for key, item in value.items()}
    return function(value)
