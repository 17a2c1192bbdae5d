"""Mistakes that a kernel may have: each yields (line, what, new source) for a place in a source.

Only functions are broken, and of these neither what is decorated, annotated, raised or printed, nor
what runs only on a GPU.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import lru_cache

Found = Iterator[tuple[int, str, str]]

WAITS = (
    "syncthreads", "syncwarp", "sync_warp", "cluster_sync", "mbarrier_wait", "cp_async_wait",
    "bulk_wait_read", "wait", "_on_barrier", "wait_for_all", "wait_for_earlier_kernels",
)  # fmt: skip
OTHER_SIGN = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "%", ast.Mod: "//"}
NEXT_TO = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
MISTAKES: list[Callable[[str], Found]] = []


def mistake(function: Callable[[Source], Found]) -> Callable[[str], Found]:
    def of(text: str) -> Found:
        return function(parsed(text))

    of.__name__, of.__doc__ = function.__name__, function.__doc__
    MISTAKES.append(of)
    return of


class Source:
    """A text, and the nodes of its functions that may be broken."""

    def __init__(self, text: str) -> None:
        self.data = text.encode()
        lines = self.data.splitlines(keepends=True)
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))
        self.nodes: list[ast.AST] = []
        self.in_loop: set[ast.AST] = set()
        for node in ast.parse(text).body:
            self._walk(node, False, False)

    def _walk(self, node: ast.AST, inside: bool, looping: bool) -> None:
        if not breakable(node):
            return
        if isinstance(node, ast.FunctionDef):
            for child in node.body:
                self._walk(child, True, False)
            return
        if inside:
            self.nodes.append(node)
            if looping:
                self.in_loop.add(node)
        looping = looping or isinstance(node, ast.For | ast.While)
        for child in ast.iter_child_nodes(node):
            self._walk(child, inside, looping)

    def of(self, *kinds: type) -> Iterator:
        return (node for node in self.nodes if isinstance(node, kinds))

    def text(self, node: ast.AST) -> str:
        start, end = self._place(node)
        return self.data[start:end].decode()

    def changed(self, *changes: tuple[ast.AST, str]) -> tuple[int, str, str]:
        """(line, what, new source) with other texts in the places of nodes."""
        data, told = self.data, []
        for node, new in sorted(changes, key=lambda c: self._place(c[0]), reverse=True):
            start, end = self._place(node)
            told.insert(0, f"{' '.join(self.text(node).split())} -> {' '.join(new.split())}")
            data = data[:start] + new.encode() + data[end:]
        return min(node.lineno for node, _ in changes), "; ".join(told), data.decode()

    def _place(self, node: ast.AST) -> tuple[int, int]:
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset


@lru_cache(maxsize=2)
def parsed(text: str) -> Source:
    return Source(text)


def breakable(node: ast.AST) -> bool:
    """Not a check, a text or a type, and not what runs only on a GPU."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.AnnAssign | ast.Import):
        return False
    if isinstance(node, ast.If | ast.IfExp):
        return "SIMULATED" not in {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)}
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id != "signature"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return False  # a docstring
    return not (isinstance(node, ast.Call) and called(node) in ("read_only", "void"))


def called(node: ast.AST) -> str:
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "id", getattr(function, "attr", ""))


def number(node: ast.AST) -> int | None:
    """The value of a whole number in the text."""
    value = getattr(node, "value", None)
    return value if isinstance(node, ast.Constant) and type(value) is int else None


@mistake
def index_off_by_one(source: Source) -> Found:
    """a[i] -> a[i + 1]"""
    for node in source.of(ast.Subscript):
        index = node.slice
        if isinstance(index, ast.Tuple) and index.elts:
            index = index.elts[-1]
        if isinstance(index, ast.Name | ast.BinOp | ast.Subscript | ast.Attribute):
            yield source.changed((index, f"{source.text(index)} + 1"))


@mistake
def guard_dropped(source: Source) -> Found:
    """if i < n -> if True;  i < n and j < m -> i < n;  min(a, b) -> a;  a if i < n else b -> a"""
    for node in source.of(ast.If):
        yield source.changed((node.test, "True"))
    for node in source.of(ast.IfExp):
        yield source.changed((node, f"({source.text(node.body)})"))
    for node in source.of(ast.BoolOp):
        for value in node.values:
            rest = [source.text(other) for other in node.values if other is not value]
            yield source.changed((node, f"({' and '.join(rest)})"))
    for node in source.of(ast.Call):
        if called(node) in ("min", "max") and len(node.args) == 2:
            for argument in node.args:
                if number(argument) is None:
                    yield source.changed((node, f"({source.text(argument)})"))


@mistake
def barrier_dropped(source: Source) -> Found:
    """cuda.syncthreads() -> pass"""
    for node in source.of(ast.Expr):
        if called(node.value) in WAITS:
            yield source.changed((node, "pass"))
    for node in source.of(ast.Call):
        if called(node) == "wait_or_part":
            yield source.changed((node, "True"))


@mistake
def phase_flipped(source: Source) -> Found:
    """mbarrier_wait(bars, i, phase) -> mbarrier_wait(bars, i, phase ^ 1)"""
    for node in source.of(ast.Call):
        if called(node) == "mbarrier_wait":
            yield source.changed((node.args[-1], f"({source.text(node.args[-1])}) ^ 1"))
    for node in source.of(ast.BinOp):
        if isinstance(node.op, ast.BitXor) and number(node.right) == 1:
            yield source.changed((node, source.text(node.left)))


@mistake
def stride_swapped(source: Source) -> Found:
    """a.shape[0] -> a.shape[1];  i * n + j -> i + j * n"""
    for node in source.of(ast.Subscript):
        if source.text(node.value).endswith(("shape", "strides")) and number(node.slice) in (0, 1):
            yield source.changed((node.slice, str(1 - number(node.slice))))
    for node in source.of(ast.BinOp):
        if isinstance(node.op, ast.Add):
            left, right = node.left, node.right
            if isinstance(left, ast.BinOp) and isinstance(left.op, ast.Mult):
                i, n, j = (source.text(part) for part in (left.left, left.right, right))
                yield source.changed((node, f"({i} + ({j}) * {n})"))


@mistake
def operands_swapped(source: Source) -> Found:
    """f(a, b) -> f(b, a);  a - b -> b - a"""
    for node in source.of(ast.Call):
        for a, b in zip(node.args, node.args[1:], strict=False):
            texts = source.text(a), source.text(b)
            names = isinstance(a, ast.Name) and isinstance(b, ast.Name) and texts[0] != texts[1]
            if names and called(node) not in ("min", "max", "span"):
                yield source.changed((a, texts[1]), (b, texts[0]))
    for node in source.of(ast.BinOp):
        if isinstance(node.op, ast.Sub | ast.FloorDiv | ast.Mod | ast.LShift | ast.RShift):
            a, b = source.text(node.left), source.text(node.right)
            yield source.changed((node.left, f"({b})"), (node.right, f"({a})"))


@mistake
def accumulator_kept(source: Source) -> Found:
    """acc[i] = 0 -> pass;  acc = float32(0) -> acc = float32(1);  acc += x -> acc = x"""
    for node in source.of(ast.Assign):
        value = node.value
        zero = value.args[0] if isinstance(value, ast.Call) and len(value.args) == 1 else value
        if getattr(zero, "value", None) not in (0, 0.0) or not isinstance(zero, ast.Constant):
            continue
        if isinstance(zero.value, bool):
            continue
        if isinstance(node.targets[0], ast.Subscript):
            yield source.changed((node, "pass"))
        else:
            yield source.changed((zero, "1"))
    for node in source.of(ast.AugAssign):
        if isinstance(node.op, ast.Add) and number(node.value) is None:
            target, value = source.text(node.target), source.text(node.value)
            yield source.changed((node, f"{target} = ({value})"))


@mistake
def comparison_moved(source: Source) -> Found:
    """i < n -> i <= n"""
    for node in source.of(ast.Compare):
        if len(node.ops) == 1 and type(node.ops[0]) in NEXT_TO:
            a, b = source.text(node.left), source.text(node.comparators[0])
            yield source.changed((node, f"{a} {NEXT_TO[type(node.ops[0])]} {b}"))


@mistake
def constant_wrong(source: Source) -> Found:
    """8 -> 16;  3 -> 4"""
    for node in source.of(ast.Constant):
        value = number(node)
        if value is not None and value > 1:
            yield source.changed((node, str(2 * value if value & (value - 1) == 0 else value + 1)))


@mistake
def sign_flipped(source: Source) -> Found:
    """a + b -> a - b"""
    for node in source.of(ast.BinOp):
        if type(node.op) in OTHER_SIGN:
            a, b = source.text(node.left), source.text(node.right)
            yield source.changed((node, f"({a}) {OTHER_SIGN[type(node.op)]} ({b})"))


@mistake
def loop_shortened(source: Source) -> Found:
    """range(n) -> range(n - 1);  range(a, n) -> range(a + 1, n)"""
    for node in source.of(ast.Call):
        if called(node) == "range":
            first = node.args[0]
            step = "- 1" if len(node.args) == 1 else "+ 1"
            yield source.changed((first, f"{source.text(first)} {step}"))
