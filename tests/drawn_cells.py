"""Recurrent cells as a case of factors says: in the library, and in float64."""

from typing import Any, NamedTuple

import numpy as np
from drawn import Operand, as_numpy, assert_within
from drawn_rounded import SURE, Arithmetic, Near, Node, lstm, multiplicative_lstm

import numbsparse as ns
from numbsparse import device, nn, ops
from numbsparse.dtypes import as_dtype, finfo
from numbsparse.nn import functional as F

GATES = 4
BEYOND = {"whole": (0, 0), "ragged": (3, 1), "ragged inputs": (0, 3)}


class Size(NamedTuple):
    blocks: int
    in_blocks: int
    B: int
    units: int
    inputs: int
    steps: int
    batch: int
    layers: int


def size_of(place: str, case: Any) -> Size:
    B, layers = case["size"], 2 if "two" in case["cell"] else 1
    if "units" in case:
        units, inputs = case["units"], case["features"]
        blocks, in_blocks = -(-units // B), -(-inputs // B)
        return Size(blocks, in_blocks, B, units, inputs, case["steps"], case["batch"], layers)
    few = device.SIMULATED and place == "cuda"
    blocks, in_blocks = (2, 1 if B > 8 else 2) if few else (4 if B < 16 else 3, 2)
    less, less_in = BEYOND.get(case["features"], (B // 4, 0))
    units, inputs = blocks * B - less, in_blocks * B - less_in
    return Size(blocks, in_blocks, B, units, inputs, case["steps"], case["batch"], layers)


def pattern_of(rng: np.random.Generator, kind: str, rows: int, columns: int) -> np.ndarray:
    i, j = np.indices((rows, columns))
    if kind == "random":
        return rng.random((rows, columns)) < 0.5
    if kind == "empty lines":
        return (i > 0) & (j > 0)
    if kind == "one block":
        return (i == rows - 1) & (j == columns - 1)
    if kind == "band":
        return abs(i - j) < 1 + (rows > 3)
    if "long" in kind:
        return (i == 0) & (kind != "long column") | (j == columns - 1) & (kind != "long row")
    return np.full((rows, columns), kind == "full")


class Matrix:
    """A weight of this shape, of which only some columns belong to units."""

    def __init__(self, rng: Any, pattern: np.ndarray, B: int, shape: Any, columns: np.ndarray):
        self.pattern, self.B, self.shape, self.columns = pattern, B, shape, columns.ravel()
        kept = np.maximum(pattern.sum(0), 1)[np.nonzero(pattern)[1]]
        values = rng.standard_normal((len(kept), B, B))
        self.values = values / np.sqrt(kept * B)[:, None, None]

    def dense(self, values: np.ndarray) -> np.ndarray:
        whole = np.zeros([n * self.B for n in self.pattern.shape])
        for block, (r, c) in zip(values, np.argwhere(self.pattern), strict=True):
            whole[r * self.B :, c * self.B :][: self.B, : self.B] = block
        return whole

    def exact(self) -> np.ndarray:
        return self.dense(self.values)[: self.shape[0], self.columns]

    def check(self, got: Any, right: Near) -> None:
        assert got.shape == self.shape
        kept = self.dense(np.ones_like(self.values))
        value, error = np.zeros_like(kept), np.zeros_like(kept)
        value[: self.shape[0], self.columns] = right.value
        error[: self.shape[0], self.columns] = right.error
        assert_within(self.dense(as_numpy(got.values)), value * kept, SURE * error * kept)

    def put(self, make: Any, order: str) -> ns.BlockSparse:
        values = self.values.copy()
        for block, (r, c) in zip(values, self.B * np.argwhere(self.pattern), strict=True):
            block[self.shape[0] - r :] = block[:, self.shape[1] - c :] = np.nan  # never read
        stored = make(values.reshape(1, -1), order).reshape(values.shape)
        return ns.BlockSparse(stored, self.pattern, shape=self.shape)


class Vector:
    """A bias or gain, of which only some values belong to units."""

    def __init__(self, values: np.ndarray, columns: Any = ...):
        self.values, self.columns = values, columns

    def exact(self) -> np.ndarray:
        return self.values[self.columns]

    def check(self, got: Any, right: Near) -> None:
        value, error = np.zeros(self.values.shape), np.zeros(self.values.shape)
        value[self.columns], error[self.columns] = right.value, right.error
        assert_within(as_numpy(got), value, SURE * error)

    def put(self, make: Any, order: str) -> Any:
        return make(self.values, order)


def of_gates(size: Size) -> np.ndarray:
    """Columns of an LSTM's units, (4, units)."""
    unit = np.arange(size.units)
    first = unit // size.B * GATES * size.B + unit % size.B
    return first + np.arange(GATES)[:, None] * size.B


def lstm_items(rng: Any, case: Any, size: Size, layer: int) -> dict[str, Any]:
    columns, apart = of_gates(size), case["cell"].startswith("F.")

    def weight(kind: str, rows: int, features: int) -> Matrix:
        pattern = np.repeat(pattern_of(rng, kind, rows, size.blocks), GATES, axis=1)
        if apart and kind == "random":  # a layout for each gate
            pattern = pattern_of(rng, kind, *pattern.shape)
        return Matrix(rng, pattern, size.B, (features, n), columns)

    n, recurrent = GATES * size.blocks * size.B, (size.blocks, size.units)
    items = {
        "weight_ih": weight(
            case["inputs"], *(recurrent if layer else (size.in_blocks, size.inputs))
        ),
        "weight_hh": weight(case["layout"], *recurrent),
        "bias": Vector(rng.standard_normal(n), columns),
    }
    if "norm" in case["cell"]:
        items["gain"] = Vector(rng.uniform(0.5, 1.5, n), columns)
    return items


def multiplicative_items(rng: Any, case: Any, size: Size) -> dict[str, Any]:
    items: dict[str, Any] = {}

    def add(name: str, pattern: np.ndarray, features: int, gates: int = 1) -> None:
        width = size.blocks * size.B
        columns = np.arange(size.units) + np.arange(gates)[:, None] * width
        shape = (gates, size.units)[gates == 1 :]
        outs = features, size.units if gates == 1 else gates * width
        weight = Matrix(rng, np.tile(pattern, (1, gates)), size.B, outs, columns)
        items[f"{name}.weight"] = weight
        items[f"{name}.gain"] = Vector(rng.uniform(0.5, 1.5, shape))
        items[f"{name}.bias"] = Vector(0.5 * rng.standard_normal(shape))

    inputs = pattern_of(rng, case["inputs"], size.in_blocks, size.blocks)
    for name in ("multiplier", "addend"):
        add(name, inputs, size.inputs)
    for step in range(int(case["cell"][-1])):
        square = pattern_of(rng, case["layout"], size.blocks, size.blocks)
        add(f"internal.{step}", square, size.units)
    gates = pattern_of(rng, case["layout"], size.blocks, size.blocks)
    add("gates", gates, size.units, GATES)
    return items


class Problem:
    """A cell with its numbers, in the library and in float64."""

    def __init__(self, place: str, case: Any, rng: np.random.Generator):
        self.place, self.case, self.rng, self.size = place, case, rng, size_of(place, case)
        name, _, precision = case["numbers"].partition(", ")
        self.dtype, self.precision = as_dtype(name), precision or "highest"
        self.wide = ops.state_dtype(self.dtype)
        self.operands: list[Operand] = []
        exact = self.dtype == self.wide and self.precision == "highest"
        self.eps = 1e-5 if exact or case["cell"][0] in "Lt" else 1e-2  # of layer norm
        self.how = self.arithmetic()
        self.home = "numpy" if place == "cpu" else "numbsparse"
        self.several = not case["cell"].startswith(("F.", "mult"))  # layers, in h and c too
        if case["cell"].startswith("mult"):
            self.items = multiplicative_items(rng, case, self.size)
        else:
            self.items = {
                f"layers.{layer}.{name}": item
                for layer in range(self.size.layers)
                for name, item in lstm_items(rng, case, self.size, layer).items()
            }
        for item in self.items.values():
            item.values = self.rounded(item.values)
        self.build()

    def arithmetic(self) -> Arithmetic:
        eps, few = float(np.finfo(self.wide).eps), finfo(self.dtype)
        if self.dtype != self.wide:
            return Arithmetic(
                eps, 0.75 * float(few.eps), float(few.smallest_subnormal), 0, 2.0**-22
            )
        least = float(few.smallest_normal)
        high = (2.0**-9, 2.0**-22) if self.precision == "high" else ()
        return Arithmetic(eps, eps, least, *high)

    def rounded(self, values: np.ndarray, dtype: Any = None) -> np.ndarray:
        return values.astype(dtype or self.dtype).astype(float)

    def put(
        self, values: np.ndarray, order: str, library: str | None = None, dtype: Any = None
    ) -> Any:
        values = values.astype(dtype or self.dtype)
        self.operands.append(Operand(values, order, library or self.home, self.place))
        return self.operands[-1].array

    def build(self) -> None:
        """`call`, and `tensors` of the parameters."""
        case, size = self.case, self.size
        if case["cell"].startswith("F."):
            self.tensors = {name: ns.Tensor(self.placed(name)) for name in self.items}
            self.call = self.function()
            return
        module = self.module().to(self.place)
        self.tensors = dict(module.named_parameters())
        assert {*self.tensors} == {*self.items}
        for name, tensor in self.tensors.items():
            data = self.placed(name)
            if isinstance(data, ns.BlockSparse):
                np.testing.assert_array_equal(tensor.data.layout.pattern, data.layout.pattern)
            tensor.data = data
        self.call = module
        shape = size.steps, size.batch, size.units
        masks = [m for _, m in module.named_modules() if isinstance(m, nn.Dropout) and m.p]
        self.kept = [ops.dropout_mask(shape, m.p, m.seed, 1, "float64", "cpu") for m in masks]
        assert len(masks) == (size.layers if case["drops"] else 0)

    def placed(self, name: str) -> Any:
        item = self.items[name]
        return item.put(self.put, self.case["w" if isinstance(item, Matrix) else "vectors"])

    def module(self) -> nn.Module:
        case, size = self.case, self.size
        patterns = {n: a.pattern for n, a in self.items.items() if isinstance(a, Matrix)}
        how: Any = {
            "block_size": size.B,
            "dtype": self.dtype,
            "precision": self.precision,
            "seed": 0,
        }
        drops = 0.5 if case["drops"] else 0.0
        if not self.several:
            layout = [p for name, p in patterns.items() if name[:8] in ("internal", "gates.we")]
            layout[-1] = layout[-1][:, : size.blocks]
            how |= {"layout": layout, "input_layout": patterns["addend.weight"], "eps": self.eps}
            steps = len(layout) - 1
            return nn.MultiplicativeLSTM(
                size.inputs, size.units, internal_steps=steps, dropout=drops, **how
            )
        ih, hh = ([p[:, ::GATES] for n, p in patterns.items() if end in n] for end in ("ih", "hh"))
        how |= {"layout": hh, "input_layout": ih, "layer_norm": "norm" in case["cell"]}
        return nn.LSTM(size.inputs, size.units, size.layers, update_dropout=drops, **how)

    def function(self) -> Any:
        size, kept = self.size, None
        if self.case["drops"]:
            shape = size.steps, size.batch, size.units
            self.kept = [self.rounded(self.rng.uniform(0, 2, shape))]
            kept = self.put(self.kept[0], self.case["vectors"])
        else:
            self.kept = []
        p = {name.removeprefix("layers.0."): tensor for name, tensor in self.tensors.items()}
        how = {
            "gain": p.pop("gain", None),
            "eps": self.eps,
            "kept": kept,
            "precision": self.precision,
        }

        def call(x: Any, state: Any) -> Any:
            y, h, c = F.lstm(x, *p.values(), *state, **how)
            return y, (h, c)

        return call

    def right(self, x: np.ndarray, h: np.ndarray, c: np.ndarray, some: Any = ...) -> Any:
        """Leaves by name, and the nodes of y, of each step, and of h and c, of each layer.

        x, h and c are those of some sequences.
        """

        def leaf(a: np.ndarray) -> Node:
            return Node(Near(a, self.how))

        leaves = {name: leaf(item.exact()) for name, item in self.items.items()}
        leaves |= {"x": leaf(x), "h": leaf(h), "c": leaf(c)}
        steps, ends = [leaves["x"][t] for t in range(len(x))], []
        for layer in range(self.size.layers):
            at = [leaves[k][layer] if self.several else leaves[k] for k in "hc"]
            kept = map(leaf, self.kept[layer][:, some]) if self.kept else [None] * len(x)
            p = {n.removeprefix(f"layers.{layer}."): a for n, a in leaves.items()}
            run = lstm if "weight_hh" in p else multiplicative_lstm
            steps, c = run(steps, p, *at, [*kept], self.eps)
            ends.append((steps[-1], c))
        return leaves, dict(zip("yhc", (steps, *map(list, zip(*ends, strict=True))), strict=True))
