"""Which rung of the ladder computes a product."""

from math import inf
from typing import Any

from numbsparse.device import DeviceArray, runtime
from numbsparse.kernels import times
from numbsparse.kernels.matmul import MADE_SIZES, OWN, PRECISIONS, RUNGS, n_tiles, rung
from numbsparse.layout import Layout
from numbsparse.ops import tuned
from numbsparse.ops.made import MadeLayout
from numbsparse.patterns.checks import check_block_size, word

MOST = 1024  # cases that are remembered, before all are forgotten
# With gates `times.DENSE`, of w times them, is for so many rows, and as if a part were kept. All of
# them one, half zero: 1.07 and 1.06 times as long as none, where strips took 1.41 and 0.90 (a
# quarter of the blocks of 8, 8,192 features, 2,048 rows, H200), of half 1.10, 1.05, and 2.55, 1.59.
DENSE_PART, DENSE_ROWS = 0.72, 256
# Values of a line, by bytes of one, up to which `aligned` copies none. A product on the tape and
# its gradients, of odd batches or features, took an H200 0.80 to 1.05 of the time so (45 drawn
# ones, 0.93 at the mean), but with float32 of 65 to 256 copied too 1.02 to 1.15.
SHORT = {2: 64, 4: 256}

era = 0
"""How often choices were forgotten."""

_chosen: dict[tuple[Any, ...], str] = {}


def choose(
    product: str,
    kernel: str,
    block_size: int,
    x: Any,
    batch: int,
    precision: str,
    layout: Layout,
    gated: bool = False,
    feature_major: bool = False,
) -> str:
    """The name of the rung that serves, maybe with a tile: the named one, or the fastest that does.

    The fastest is what `numbsparse.tune` measured, else what the library's own measurements
    expect (see `times`), else the last of the ladder.

    Worked out once for each case, then looked up. Raises ValueError where none serves. Of a product
    with gates the fastest is one that may skip blocks, or `times.DENSE` of many of them.
    """
    on_gpu = isinstance(x, DeviceArray)
    if on_gpu and isinstance(layout, MadeLayout) and block_size not in MADE_SIZES:
        raise ValueError(f"a layout made on a GPU takes blocks of {MADE_SIZES}, got {block_size}")
    part = 1.0 if not gated else DENSE_PART if batch >= DENSE_ROWS else 0.0
    auto = on_gpu and kernel == "auto"
    of = product, block_size, x.dtype
    dense = auto and part > 0 and times.is_dense(*of, batch, layout, part)
    spread = times.spread_of(product, block_size, layout) if auto else None
    how = block_size, batch, precision, gated, feature_major, dense, spread
    which = layout.shape, layout.n_blocks, layout.longest
    case: tuple[Any, ...] = (product, kernel, *how, x.dtype, type(x), type(layout), *which)
    if runtime.several_devices:  # of which one may do what another one does not
        case = (*case, runtime.current_id())
    name = _chosen.get(case)
    if name is None:
        if kernel == "auto":
            check_block_size(block_size)
        names = _checked(kernel, precision, "cuda" if on_gpu else "cpu")
        if auto:
            names = [name for name in names if name != times.DENSE or dense or not gated]
            own = *of, batch, precision, layout, feature_major
            expected, here = times.expected(*own), tuned.fastest(tuned.case(*own))
            names = sorted(names, key=lambda name: -expected.get(name, inf))
            names += [here] if here and here.partition("/")[0] in names else []
        name = _last_that_serves(names, product, block_size, x, batch, precision)
        if len(_chosen) >= MOST:  # every batch is a case, and batches may grow without end
            forget()
        _chosen[case] = name
    return name


def lies_across(x: Any) -> bool:
    """Whether x (batch, features) is feature-major on a GPU: the batch is contiguous."""
    rows = isinstance(x, DeviceArray) and len(x.shape) == 2 and x.shape[0] > 1
    return rows and x.batch_is_contiguous


def rows_of(x: Any) -> int:
    """Rows of x (batch, features) to choose by: a multiple of 16 bytes of a feature-major one whose
    features begin at such, so that none is copied."""
    rows = x.shape[0]
    if lies_across(x) and x.strides[1] % 16 == x.address % 16 == 0:
        rows += -rows % (16 // x.itemsize)
    return rows  # type: ignore[no-any-return]


def begins_anywhere(x: Any) -> bool:
    """Whether x is a matrix on a GPU whose lines, rows or columns, do not all begin at multiples of
    16 bytes and have more than SHORT values: products copy it.
    """
    if not (isinstance(x, DeviceArray) and len(x.shape) == 2 and x.itemsize in SHORT):
        return False
    if x.shape[x.strides[1] == x.itemsize] <= SHORT[x.itemsize]:
        return False
    from numbsparse.kernels.parts.aligned import is_aligned  # which loads numba.cuda

    return not (is_aligned(x) or is_aligned(x.T))


def aligned(x: Any) -> Any:
    """x, or if it `begins_anywhere` a copy that several products read as it is."""
    if not begins_anywhere(x):
        return x
    from numbsparse.kernels.parts.aligned import aligned_in_place

    return aligned_in_place(x)[0]


def checked_kernel(kernel: str) -> str:
    """Refuse what is no word, before it is compared with one or looked up."""
    if not isinstance(kernel, str):
        raise ValueError(f'kernel takes "auto" or one of {[*RUNGS, *OWN]}, got {kernel!r}')
    return kernel


def forget() -> None:
    """Choose again in each case: something was measured."""
    global era
    _chosen.clear()
    era += 1


def serving(
    product: str, block_size: int, dtype: Any, place: str, batch: int, precision: str
) -> list[str]:
    """The library's rungs that serve a case, the ladder's last first."""
    names = _checked("auto", precision, place)
    case = (product, block_size, dtype, place, batch, precision)
    return [name for name in reversed(names) if rung(name).unsupported(*case) is None]


def with_tiles(
    product: str, block_size: int, dtype: Any, place: str, batch: int, precision: str
) -> list[str]:
    """The rungs that serve a case, each with each tile that is worth trying."""
    case = (product, block_size, dtype, batch, precision)
    return [
        f"{name}/{tile}" if tile else name
        for name in serving(product, block_size, dtype, place, batch, precision)
        for tile in range(n_tiles(name, *case))
    ]


def _checked(kernel: str, precision: str, place: str) -> list[str]:
    """The rungs to choose from, in the order of the ladder."""
    word("precision", precision, PRECISIONS)
    if kernel == "auto":  # the reference is for checking, never for speed
        return [name for name in RUNGS if RUNGS[name] == place and name != "k0_reference"]
    names = [*RUNGS, *OWN]
    if kernel.partition("/")[0] not in names or kernel.endswith("/"):
        raise ValueError(f'kernel takes "auto" or one of {names}, got {kernel!r}')
    return [kernel]


def _last_that_serves(
    names: list[str], product: str, block_size: int, x: Any, batch: int, precision: str
) -> str:
    place = "cuda" if isinstance(x, DeviceArray) else "cpu"
    reasons = []
    for kernel in reversed(names):
        name, _, tile = kernel.partition("/")
        case = (product, block_size, x.dtype, batch, precision)
        reason = rung(name).unsupported(*case[:3], place, *case[3:])
        if reason is None and tile and tile not in map(str, range(n_tiles(name, *case))):
            reason = f"{name} has {n_tiles(name, *case)} tiles for this, counted from 0, got {tile}"
        if reason is None:
            return kernel
        reasons.append(reason)
    raise ValueError("; ".join(reasons))
