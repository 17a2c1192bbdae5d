"""Sequential: modules one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from numbsparse.nn.module import Module


class Sequential(Module):
    """Modules one after the other: Sequential(a, b)(x) = b(a(x)).

    >>> import numpy as np, numbsparse as ns
    >>> model = ns.nn.Sequential(ns.nn.Linear(64, 32, seed=0), ns.nn.ReLU())
    >>> model(np.ones((2, 64), np.float32)).shape
    (2, 32)
    """

    def __init__(self, *modules: Module):
        super().__init__()
        for module in modules:
            if not isinstance(module, Module):
                raise TypeError(f"modules takes Modules, got {type(module).__name__}")
        self.modules = modules

    def named_children(self) -> Iterator[tuple[str, Module]]:
        return ((str(i), module) for i, module in enumerate(self.modules))

    def forward(self, x: Any) -> Any:
        for module in self.modules:
            x = module(x)
        return x

    def __getitem__(self, i: int) -> Module:
        return self.modules[i]

    def __len__(self) -> int:
        return len(self.modules)
