"""What stands for a layout in an operator's arguments, which are tensors, numbers and words.

The word is made of the layout's contents, so it is the same in every process: in those of a
distributed run, in a compiled graph that torch kept on disk, beside a pickled module. A table finds
the layout by it, and keeps no layout alive: handles do, which modules, matrices and the tape hold.
"""

from typing import Any
from weakref import WeakValueDictionary

import torch

from numbsparse.layout import Layout, as_layout

_layouts: WeakValueDictionary[str, Layout] = WeakValueDictionary()


class Handle:
    """A layout, or pattern, and the word for it; a copy, or one that was pickled, serves as well.

    >>> handle = Handle([[1, 0, 1], [0, 1, 0]])
    >>> handle.word.partition("-")[0], layout_of(handle.word)
    ('2x3', Layout(2 x 3, 3 blocks, density 0.5))
    """

    def __init__(self, layout: Any):
        layout = as_layout(layout)
        self.word = layout.word
        self.layout: Layout = _layouts.setdefault(self.word, layout)  # equal layouts share one
        self.grid, self.n_blocks = layout.shape, layout.n_blocks  # numbers, which torch can trace
        if self.layout is not layout:
            layout.__dict__["equal"] = self.layout  # lives as long as any of them

    def __reduce__(self) -> tuple[Any, ...]:
        return Handle, (self.layout,)


# As what torch.compile traces meets a layout, torch 2.11 takes it for a constant only if told so.
if (_register := getattr(torch.utils._pytree, "register_constant", None)) is not None:
    _register(Layout)


@torch.compiler.assume_constant_result
def handle_of(layout: Any) -> Handle:
    """The layout's handle, made outside of what torch.compile traces."""
    return Handle(layout)


def layout_of(word: str) -> Layout:
    """The layout that a word stands for.

    Raises LookupError where no handle of this process has it: a graph was exported elsewhere, or
    outlived its layout.
    """
    layout = _layouts.get(word)
    if layout is None:
        raise LookupError(
            f"no layout here has the handle {word!r}: make the layout's matrix or module before "
            "running what was compiled or exported with it, and keep it"
        )
    return layout
