"""Embedding: a row of a table for each index."""

from typing import Any

import numpy as np

from numbsparse.autograd import Tensor
from numbsparse.dtypes import float_dtype
from numbsparse.nn import functional
from numbsparse.nn.module import Module, Parameter
from numbsparse.patterns.checks import any_generator, integer


class Embedding(Module):
    """indices (...) to rows of a table: (..., embedding_dim).

    The table (num_embeddings, embedding_dim) is drawn from a standard normal, as in torch.

    >>> import numpy as np, numbsparse as ns
    >>> table = ns.nn.Embedding(10, 4, seed=0)
    >>> table(np.array([[1, 2, 1]])).shape
    (1, 3, 4)
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *, dtype: Any = np.float32, seed: Any = None
    ):
        super().__init__()
        n = integer("num_embeddings", num_embeddings)
        width = integer("embedding_dim", embedding_dim)
        table = any_generator(seed).standard_normal((n, width))
        self.weight = Parameter(table.astype(float_dtype(dtype)))

    def forward(self, indices: Any) -> Tensor:
        return functional.embedding(self.weight, indices)

    def describe(self) -> str:
        return "{}, {}".format(*self.weight.shape)
