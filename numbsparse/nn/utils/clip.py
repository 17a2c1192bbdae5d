"""What is done to the gradients of a model between `backward` and a step."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from numbsparse import ops
from numbsparse.autograd import Tensor, tensors_of
from numbsparse.dtypes import type_name
from numbsparse.patterns.checks import number

if TYPE_CHECKING:
    from numbsparse.nn.scaling import LossScaler


def clip_grad_norm(
    parameters: Iterable[Tensor], max_norm: float, *, scaler: "LossScaler | None" = None
) -> Tensor:
    """Scale all gradients by min(1, max_norm / norm), where norm is that of all of them together.

    norm = sqrt(sum of the squares of all gradients), of block-sparse ones those of the kept blocks.
    Each `p.grad` becomes a new Tensor: the arrays that were there, one given to `backward` among
    them, keep their values.

    Parameters
    ----------
    parameters : Tensors, dense and block-sparse, in one place
        On a GPU their dtypes may differ. Those without a gradient are left out.
    max_norm : float, above 0
    scaler : LossScaler, optional
        The one whose loss led to the gradients: norm and max_norm are without its scale.

    Returns
    -------
    Tensor: the norm before, where the gradients are. Nothing is copied to the host
        Where it is infinite or NaN the gradients stay as they are; `LossScaler` then skips a step.

    Raises ValueError for a max_norm that is not a number above 0.

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> p = ns.nn.Parameter(np.zeros(2, np.float32))
    >>> p.grad = ns.Tensor(np.float32([3, 4]))
    >>> ns.nn.utils.clip_grad_norm([p], 1.0).item()
    5.0
    >>> p.grad
    Tensor([0.6, 0.8], dtype=float32)

    Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks", 2013,
    section 3.2.
    """
    if number("max_norm", max_norm) == 0:
        raise ValueError(f"max_norm takes a number above 0, got {max_norm!r}")
    if scaler is not None and not hasattr(scaler, "array_in"):
        raise TypeError(f"scaler takes a LossScaler, got {type_name(scaler)}")
    found = [p for p in tensors_of("parameters", parameters) if p.grad is not None]
    gradients: list[Any] = tensors_of("gradients", [p.grad for p in found])
    if not found:
        return Tensor(np.zeros((), np.float32))
    scale = None if scaler is None else scaler.array_in(gradients[0].device)
    norm, scaled = ops.scale_to_norm([grad.data for grad in gradients], max_norm, scale)
    for p, data in zip(found, scaled, strict=True):
        p.grad = Tensor(data)
    return Tensor(norm)
