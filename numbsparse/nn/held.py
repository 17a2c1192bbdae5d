"""What an object holds of some kinds, in attributes, and in lists, tuples and dicts of them."""

from collections import UserList, deque
from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

ORDERED = (list, tuple, deque, UserList, ValuesView, ItemsView)
SETS = (set, frozenset)
PLAIN = frozenset({type(None), bool, int, float, str})  # most attributes, which hold nothing


def held(attributes: Mapping[str, Any], kinds: tuple[type, ...]) -> Iterator[tuple[str, Any]]:
    """The values of these kinds, with their names: "head", "blocks.0", "heads.left.1".

    Looked for again each time, so that a list may grow. Raises TypeError where a set holds one: its
    order, and so the names, would differ from run to run.

    >>> list(held({"scale": 0.5, "blocks": [1, {"left": 2}]}, (int,)))
    [('blocks.0', 1), ('blocks.1.left', 2)]
    """
    return _within(attributes, attributes.items(), "", kinds, ())


def holds(value: Any, kinds: tuple[type, ...]) -> bool:
    """Whether a value is of these kinds, or holds one, or may in time."""
    return isinstance(value, (*kinds, *SETS)) or _items(value) is not None


def _within(
    owner: Any, items: Iterable[Any], prefix: str, kinds: tuple[type, ...], above: tuple[int, ...]
) -> Iterator[tuple[str, Any]]:
    if id(owner) in above:  # a list that holds itself
        return
    above = (*above, id(owner))
    for key, item in items:
        if isinstance(item, kinds):
            yield f"{prefix}{key}", item
        elif (inner := _items(item)) is not None:
            yield from _within(item, inner, f"{prefix}{key}.", kinds, above)
        elif isinstance(item, SETS) and any(isinstance(one, kinds) for one in item):
            raise TypeError(
                f"{prefix}{key} holds parameters or modules in a set, which has no order: "
                "use a list, a tuple or a dict"
            )


def _items(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """What a value holds, with keys; None where it is not looked into."""
    if type(value) in PLAIN:
        return None
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, ORDERED):
        return enumerate(value)
    if isinstance(value, np.ndarray):
        return enumerate(value.flat) if value.dtype.hasobject else None
    if isinstance(value, SimpleNamespace):
        return vars(value).items()
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name, None)) for field in fields(value)]
    return None
