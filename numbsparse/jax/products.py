"""The three products as primitives of JAX, closed under differentiation.

Of a dense x (rows, in_features), a dense y (rows, out_features) and the values of a matrix w they
are y = x @ w, x = y @ w.T, and w = x.T @ y at the kept blocks. Each is linear in both of its
operands, and its two gradients are the two others: so JAX has derivatives of any order, forward and
reverse, by two rules for each.
"""

import atexit
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from numbsparse import ops
from numbsparse.block_sparse import BlockSparse, unchecked
from numbsparse.device import runtime
from numbsparse.jax import ffi
from numbsparse.jax.shards import dealt_by_rows
from numbsparse.kernels.matmul import rung
from numbsparse.layout import Layout

# Layouts of all matrices and all that was lowered, by the word for them in compiled code, which
# JAX keeps on disk too, or a program exported: that may run at any time.
_layouts: dict[str, Layout] = {}


def meet(layout: Layout) -> None:
    """Keep the layout for whatever may have been compiled, or exported, with it."""
    _layouts.setdefault(layout.word, layout)


def _layout(word: str) -> Layout:
    if word in _layouts:
        return _layouts[word]
    raise LookupError(
        f"no layout here has the word {word!r}: make the layout's matrix before calling what was "
        "exported with it"
    )


@atexit.register
def _wait() -> None:
    """XLA works on while Python ends, and a handler that it calls then takes the process down."""
    if _layouts:
        ffi.wait_for_calls()


def _matrix(values: Any, layout: str, x: Any, y: Any) -> BlockSparse:
    """It was checked when JAX traced the call."""
    return unchecked(values, _layout(layout), (x.shape[1], y.shape[1]))


def _matmul(x: Any, w: Any, y: Any, layout: str, precision: str, *_: str) -> None:
    ops.matmul(x, _matrix(w, layout, x, y), out=y, precision=precision)


def _transposed(y: Any, w: Any, x: Any, layout: str, precision: str, *_: str) -> None:
    ops.matmul(y, _matrix(w, layout, x, y).T, out=x, precision=precision)


def _sddmm(x: Any, y: Any, w: Any, layout: str, precision: str, *_: str) -> None:
    ops.sddmm_into(w, x.T, y, _layout(layout), precision=precision)


STATIC = "layout", "shape", "block_size", "precision"  # the same four of all three, and `asks`


def _primitive(name: str, compute: Callable[..., None], side: int | None) -> Primitive:
    """A product; `side` says which features its rows have, None that it is values of blocks."""
    made, target, rowwise = Primitive(name), f"numbsparse_{name}", side is not None
    ffi.register(target, compute)

    def shape_of(a: Any, layout: Layout, shape: tuple[int, int], block_size: int) -> Any:
        if side is None:
            return layout.n_blocks, block_size, block_size
        return a.shape[0], shape[side]

    def call(a: Any, b: Any, layout: Layout, shape: Any, size: int, precision: str) -> Any:
        y = jax.ShapeDtypeStruct(shape_of(a, layout, shape, size), a.dtype)
        sides = *a.shape, *b.shape, *y.shape
        forms = a.dtype, *(sides if all(type(n) is int for n in sides) else [ffi.ANY_SHAPE])
        said = " ".join(map(str, (layout.word, precision, *forms)))
        meet(layout)
        return jax.ffi.ffi_call(target, y)(a, b, said=said)

    def result(a: Any, b: Any, *, precision: str, asks: Any, **how: Any) -> Any:
        if _varies(a) or _varies(b):
            raise NotImplementedError(
                "numbsparse.jax takes jax.shard_map(..., check_vma=False), and gradients summed "
                "over devices by you; or jax.jit of arrays that are sharded"
            )
        return jax.core.ShapedArray(shape_of(a, **how), a.dtype)

    dealt = dealt_by_rows(call, "n c, b i j -> n k" if rowwise else "n c, n k -> b i j")
    lower = mlir.lower_fun(lambda a, b, **how: dealt(a, b, *map(how.get, STATIC)), False)

    def lower_on_cpu(ctx: Any, a: Any, b: Any, **how: Any) -> Any:
        rung("k0_cpu")  # XLA may call while Python ends, when what makes threads does not load
        return lower(ctx, a, b, **how)

    def lower_on_gpu(ctx: Any, a: Any, b: Any, **how: Any) -> Any:
        if ctx.avals_in[0].dtype == jnp.float64:
            raise TypeError("arrays on a GPU take float16, bfloat16 or float32, got float64")
        if runtime.is_available():  # threads of several GPUs at once may see half of what they load
            rung("k1_naive")
        return lower(ctx, a, b, **how)

    def refuse(ctx: Any, *operands: Any, **how: Any) -> Any:
        raise NotImplementedError(
            "numbsparse.jax computes on the CPU and on NVIDIA GPUs: put arrays there by "
            'jax.device_put(x, jax.devices("cpu")[0])'
        )

    compiled = jax.jit(made.bind, static_argnames=(*STATIC, "asks"))

    def compute_now(a: Any, b: Any, **how: Any) -> Any:
        if not jax.config.jax_disable_jit:
            return compiled(a, b, **how)
        with jax.disable_jit(False):  # a primitive is compiled even then
            return compiled(a, b, **how)

    made.def_impl(compute_now)
    made.def_abstract_eval(result)
    mlir.register_lowering(made, refuse)
    mlir.register_lowering(made, lower_on_cpu, platform="cpu")
    mlir.register_lowering(made, lower_on_gpu, platform="cuda")
    batching.primitive_batchers[made] = lambda operands, axes, **how: _vmapped(
        made, rowwise, operands, axes, how
    )
    return made


def _varies(operand: Any) -> Any:
    """The axes of devices over which shard_map says that an operand differs, if it is asked to.

    Of such axes JAX makes sums of gradients, but in primitives of its own alone.
    """
    kind = getattr(operand, "mat", None)  # as JAX 0.10 has them; earlier ones have them in `vma`
    return kind.varying if kind is not None else getattr(operand, "vma", ())


def _vmapped(made: Primitive, rowwise: bool, operands: Any, axes: Any, how: Any) -> Any:
    """One product of all rows; of several weights a product each, one after the other."""
    if rowwise and axes[1] is None:
        a = jnp.moveaxis(operands[0], axes[0], 0)
        y = made.bind(a.reshape(a.shape[0] * a.shape[1], a.shape[2]), operands[1], **how)
        return y.reshape(*a.shape[:2], y.shape[1]), 0
    moved = {
        i: jnp.moveaxis(operand, axis, 0)
        for i, (operand, axis) in enumerate(zip(operands, axes, strict=True))
        if axis is not None
    }

    def one(some: Any) -> Any:
        return made.bind(*(some.get(i, operands[i]) for i in (0, 1)), **how)

    return jax.lax.map(one, moved), 0


def _gradient(product: int, a: int, b: int) -> Callable[..., Any]:
    return lambda *of, **how: PRODUCTS[product].bind(of[a], of[b], **how)


matmul = _primitive("block_sparse_matmul", _matmul, 1)
transposed = _primitive("block_sparse_matmul_transposed", _transposed, 0)
sddmm = _primitive("block_sparse_sddmm", _sddmm, None)

PRODUCTS = matmul, transposed, sddmm
for _product, _gradients in zip(PRODUCTS, ops.GRADIENTS, strict=True):
    ad.defbilinear(_product, *(_gradient(*of) for of in _gradients))
