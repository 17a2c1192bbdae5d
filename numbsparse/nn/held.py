"""What an object holds of some kinds, in attributes, and in lists, tuples and dicts of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

CONTAINERS = (list, tuple, deque, Mapping)
SETS = (set, frozenset)


def held(attributes: Mapping[str, Any], kinds: tuple[type, ...]) -> Iterator[tuple[str, Any]]:
    """The values of these kinds, with their names: "head", "blocks.0", "heads.left.1".

    Looked for anew each time, so that a list may grow. Raises TypeError where a set holds one: its
    order, and so the names, would differ from run to run.

    >>> list(held({"scale": 0.5, "blocks": [1, {"left": 2}]}, (int,)))
    [('blocks.0', 1), ('blocks.1.left', 2)]
    """
    return _within(attributes, "", kinds, ())


def _within(
    values: Any, prefix: str, kinds: tuple[type, ...], above: tuple[int, ...]
) -> Iterator[tuple[str, Any]]:
    if id(values) in above:  # a list that holds itself
        return
    above = (*above, id(values))
    for key, item in values.items() if isinstance(values, Mapping) else enumerate(values):
        if isinstance(item, kinds):
            yield f"{prefix}{key}", item
        elif isinstance(item, CONTAINERS):
            yield from _within(item, f"{prefix}{key}.", kinds, above)
        elif isinstance(item, SETS) and any(isinstance(one, kinds) for one in item):
            raise TypeError(
                f"{prefix}{key} holds parameters or modules in a set, which has no order: "
                "take a list, a tuple or a dict"
            )
