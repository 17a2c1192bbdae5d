"""What an operation keeps for its gradient is refused there if it was changed since."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from numbsparse import edits
from numbsparse.block_sparse import BlockSparse

if TYPE_CHECKING:
    from numbsparse.autograd.tensor import Tensor


def values_of(data: Any) -> Any:
    """The numbers of what a Tensor holds, as one array."""
    return data.values if isinstance(data, BlockSparse) else data


def unchanged(*tensors: Tensor) -> None:
    """In a vjp that has the values already: refuse tensors that were changed since."""
    for tensor in tensors:
        _ = tensor.data


def fingerprints(*tensors: Tensor) -> dict[int, int]:
    """Of those on the CPU, where NumPy may write, by their ids."""
    found = {}
    for tensor in tensors:
        values = tensor._data
        if type(values) is BlockSparse:
            values = values.values
        if type(values) is np.ndarray:
            small = values.size <= edits.SAMPLES
            found[id(tensor)] = hash(values.tobytes()) if small else edits.fingerprint(values)
    return found


def check_unchanged(tensor: Tensor, result: Tensor, vjp: Any) -> None:
    """Refuse a tensor that the gradient of `result` reads, and that was changed since."""
    since = result._serial
    if tensor._serial > since:  # it came later: not what the operation kept
        return
    values = values_of(tensor._data)
    for edit in (tensor._edit, edits.last_of(values)):
        if edit is not None and edit.serial > since:
            raise RuntimeError(_changed(tensor, vjp, edit.by))
    known = (result._prints or {}).get(id(tensor))
    if known is not None and isinstance(values, np.ndarray) and edits.fingerprint(values) != known:
        raise RuntimeError(_changed(tensor, vjp, "a write to its array, as with NumPy,"))


def function_of(vjp: Any) -> str:
    """The name of the function that recorded it."""
    name: str = vjp.__qualname__.partition(".")[0]
    return name.strip("_").replace("_", " ") if name.startswith("_") else name


def _changed(tensor: Tensor, vjp: Any, by: str) -> str:
    kind = type(tensor).__name__
    function = function_of(vjp)
    cells = dict(zip(vjp.__code__.co_freevars, vjp.__closure__ or (), strict=True))
    names = [name for name, cell in cells.items() if cell.cell_contents is tensor]
    name = f"{names[0]} of {function}" if names else f"an operand, or the result, of {function}"
    return (
        f"{name}, a {kind} of shape {tensor.shape}, {tensor.dtype}, was changed by {by} after the "
        "forward pass, and its gradient would be made of the new values: run the forward pass "
        "again, change it after backward, or give the forward pass a copy"
    )
