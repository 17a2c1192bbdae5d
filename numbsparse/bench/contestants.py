"""Who computes: numbsparse's rungs and convolutions, and the peers, where they are installed.

Peers are, through torch on the GPU, cuBLAS, Triton, cuSPARSE, and cuDNN's convolutions; on the CPU
NumPy, SciPy and torch. Each gets its operands as it likes them best, made before the clock runs:
the sparse ones of torch multiply from the left, y.T = w.T @ x.T, with activations feature-major.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from numbsparse import ops
from numbsparse.bench.problem import Problem
from numbsparse.bench.timing import Recorder, record, record_torch
from numbsparse.block_sparse import BlockSparse
from numbsparse.device import DeviceArray, as_device_array, empty, is_available
from numbsparse.kernels import conv, ladder
from numbsparse.kernels.matmul import function_of, serving_own
from numbsparse.layout import Layout
from numbsparse.ops.choice import choose, serving
from numbsparse.ops.conv_operands import as_pixels

FEATURE_MAJOR = "feature-major"
OURS = "numbsparse"  # a convolution
CUBLAS, TRITON, CUSPARSE, CUDNN = "cuBLAS dense", "torch BSR", "cuSPARSE CSR", "cuDNN dense"
NUMPY, BY_BLOCK, SCIPY = "NumPy dense", "NumPy by block", "SciPy BSR"
ON_CPU = (NUMPY, BY_BLOCK, SCIPY, TRITON)

Make = Callable[[Problem, str], "Contestant"]
Makers = dict[str, Make]
Pick = Callable[[Any, np.ndarray], np.ndarray]


class Contestant:
    """A call that computes one product; a call that is recorded does so again with each replay.

    Attributes
    ----------
    record : makes a graph of calls
    got : what `call` computed last, whole
    """

    def __init__(
        self, compute: Callable[[], Any], pick: Pick, record: Recorder = record, out: Any = None
    ):
        """`out` is what is computed into; None, `compute` gives the result."""
        self._compute, self._pick, self.record, self._given = compute, pick, record, out
        self.got: Any = None

    def call(self) -> None:
        result = self._compute()
        self.got = result if self._given is None else self._given

    @property
    def out(self) -> DeviceArray:
        """`got` on the GPU, contiguous."""
        return self.got if isinstance(self.got, DeviceArray) else as_device_array(self.got, "")

    def pick(self, picked: np.ndarray) -> np.ndarray:
        """Rows of y or dx (of images: pixels), or blocks of dw, on the host."""
        return self._pick(self.got, picked)


def contestants_of(
    problem: Problem, product: str, kernels: str, others: tuple[str, ...] = ()
) -> Makers:
    """Ours by name: see `named`; with FEATURE_MAJOR among `others`, each in that order too."""
    if problem.side:
        if kernels in ("", "auto"):
            return {OURS: by_ops} if kernels else {}
        names = kernels.split(",")
        return {name: by_ops if name == OURS else partial(of_rung, kernel=name) for name in names}
    names = named(problem, product, kernels)
    make = by_ops if problem.place == "cpu" else of_rung
    makers: Makers = {name: partial(make, kernel=name) for name in names}
    if problem.place == "cpu" and kernels == "auto":  # as users call it, who name no rung
        makers = dict.fromkeys(names, by_ops)
    if FEATURE_MAJOR in others:
        by_feature = partial(of_rung, feature_major=True)
        makers |= {f"{name} {FEATURE_MAJOR}": partial(by_feature, kernel=name) for name in names}
    return makers


def chosen(problem: Problem, product: str, feature_major: bool = False) -> str:
    """The rung that `ops` takes by itself; ValueError with the reasons where none serves."""
    if problem.side:
        return OURS
    x = problem.here(problem.x)
    case = problem.block_size, x, problem.batch, problem.precision, problem.layout
    return choose(product, "auto", *case, feature_major=feature_major)


def named(problem: Problem, product: str, kernels: str) -> list[str]:
    """ "auto": the rung that `ops` takes; "all" that serve; or those of a list with commas.

    They stand in reading order, users' rungs behind; a list may name taught steps as well.
    """
    if kernels == "auto":
        return [chosen(problem, product)]
    dtype, place = problem.x.dtype, problem.place
    case = product, problem.block_size, dtype, place, problem.batch, problem.precision
    names = serving(*case)[::-1] + serving_own(*case)
    if kernels == "all":
        return names
    wanted = kernels.split(",")
    steps = [name for name in ladder.NAMES if name in wanted]
    names += [name for name in steps if ladder.step(name).unsupported(*case) is None]
    return [name for name in names if name in wanted]


def of_rung(problem: Problem, product: str, kernel: str, feature_major: bool = False) -> Contestant:
    """A rung or a taught step, called as `ops.matmul` and `ops.sddmm` call it, on a GPU.

    With `feature_major` as for `w @ x`: x, dy, y and dx are views of (features, batch). Of images a
    rung of convolutions, as `ops.conv` calls it.
    """
    whole = out = problem.out(product)
    x, dy, values = problem.x.device, problem.dy.device, problem.values.device
    index, pick, window = problem.index, rows_of, tuple[Any, ...]()
    if feature_major:
        x, dy = problem.x.feature_major, problem.dy.feature_major
        if product != "weight_grad":
            whole = whole.reshape(whole.shape[::-1])
            out, pick = whole.T, columns_of
    if problem.side:
        compute, window = conv.function_of(kernel, product), (problem.window,)
        x, dy = as_pixels(x), as_pixels(dy)
        out = whole if product == "weight_grad" else as_pixels(whole)
    else:
        taught = kernel in ladder.NAMES
        compute = ladder.step(kernel).forward if taught else function_of(kernel, product)
    operands = {
        "forward": (x, values, index),
        "input_grad": (dy, values, index),
        "weight_grad": (x, dy, index),
    }[product]
    call = partial(compute, *operands, *window, out, problem.precision)
    return Contestant(call, pick, out=whole)


def by_ops(problem: Problem, product: str, kernel: str = "auto") -> Contestant:
    """A product or a convolution as users call it, its result allocated too."""
    x, dy, w = problem.here(problem.x), problem.here(problem.dy), problem.w
    how: Any = {"kernel": kernel, "precision": problem.precision}
    window = problem.window
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: ops.matmul(x, w, **how),
        "input_grad": lambda: ops.matmul(dy, w.T, **how),
        "weight_grad": lambda: ops.sddmm(x.T, dy, w, **how).values,
    }
    if problem.side:
        calls = {
            "forward": lambda: ops.conv(x, w, window, **how),
            "input_grad": lambda: ops.conv_transpose(dy, w, window, 2, problem.in_features, **how),
            "weight_grad": lambda: ops.conv_weight_grad(x, dy, w, window, **how).values,
        }
    return Contestant(calls[product], rows_of)


def columns_of(out: DeviceArray, picked: np.ndarray) -> np.ndarray:
    """Some rows of y or dx, where they lie feature-major."""
    return out.numpy().T[picked]


def rows_of(out: Any, picked: np.ndarray) -> np.ndarray:
    """Some rows of y or dx, pixels of images, or blocks of dw (n_blocks, B, B)."""
    is_blocks = out.ndim == 3 and out.shape[1] == out.shape[2]
    lines = out if is_blocks else out.reshape(-1, out.shape[-1])
    if isinstance(out, np.ndarray):
        return lines[picked]
    found = [lines[int(row)].numpy() for row in picked]
    return np.stack(found) if found else np.empty((0, *lines.shape[1:]), out.dtype)


def torch_here() -> Any:
    """torch, where it is installed; else None."""
    try:
        import torch
    except ImportError:
        return None
    return torch


def torch_on_gpu() -> Any:
    """torch, where it is installed with CUDA; else None."""
    torch = torch_here()
    return torch if torch and is_available() and torch.cuda.is_available() else None


def peers(problem: Problem, product: str, names: tuple[str, ...]) -> Makers:
    """The named peers that can take this product.

    SciPy and torch have no weight-gradient on the CPU; there NumPy's small products, block by
    block, stand in.
    """
    of_w = product != "weight_grad"
    if not names:  # torch takes seconds to load
        return {}
    if problem.place == "cpu":
        serves = {
            NUMPY: (_numpy, True),
            BY_BLOCK: (_numpy_by_block, not of_w),
            SCIPY: (_scipy, of_w),
            TRITON: (_torch_on_cpu, of_w and torch_here() is not None),
        }
    elif torch_on_gpu() is None:
        return {}
    elif problem.side:
        serves = {CUDNN: (_cudnn, True)}
    else:
        single = problem.dtype == "float32" and problem.precision == "highest"
        serves = {
            # Its time depends on nothing but the features and the batch.
            CUBLAS: (_cublas, problem.layout.density == 1),
            TRITON: (_triton, problem.precision == "highest"),
            CUSPARSE: (_cusparse, single and of_w),
        }
    return {name: make for name, (make, can) in serves.items() if name in names and can}


def _cublas(problem: Problem, product: str) -> Contestant:
    """The dense product; of a layout that keeps every block."""
    torch = torch_on_gpu()
    torch.set_float32_matmul_precision(problem.precision)
    x, dy = as_torch(problem.x.device), as_torch(problem.dy.device)
    (rows, columns), size = problem.layout.shape, problem.block_size
    if product == "weight_grad":
        out = empty((problem.in_features, problem.out_features), problem.x.device.dtype)
        dw = as_torch(out)
        blocks = dw.view(rows, size, columns, size).transpose(1, 2)

        def pick(_: Any, b: np.ndarray) -> np.ndarray:
            return _host(blocks[_places(b // columns), _places(b % columns)])

        return Contestant(lambda: torch.mm(x.T, dy, out=dw), pick, record_torch, out)
    w = as_torch(problem.values.device).view(rows, columns, size, size)
    w = w.transpose(1, 2).reshape(problem.in_features, problem.out_features)
    operand, matrix = (x, w) if product == "forward" else (dy, w.T)
    out = problem.out(product)
    y = as_torch(out)
    return Contestant(lambda: torch.mm(operand, matrix, out=y), rows_of, record_torch, out)


def _triton(problem: Problem, product: str) -> Contestant:
    """PyTorch's Triton kernels for its block-sparse tensors."""
    from torch.sparse import _triton_ops

    warnings.filterwarnings("ignore", message="bsr_dense_addmm uses non-optimal")  # a line a shape

    if product == "weight_grad":
        out = problem.out(product)
        dw = bsr_tensor(problem.layout, as_torch(out))
        x, dy = as_torch(problem.x.device).T.contiguous(), as_torch(problem.dy.device)
        how: Any = {"beta": 0.0, "out": dw, "skip_checks": True}
        compute = partial(_triton_ops.sampled_addmm, dw, x, dy, **how)
        return Contestant(compute, rows_of, record_torch, out)
    w, operand, out, y = _from_the_left(problem, product)
    compute = partial(_triton_ops.bsr_dense_addmm, y, w, operand, beta=0, out=y)
    return Contestant(compute, columns_of, record_torch, out)


def _cusparse(problem: Problem, product: str) -> Contestant:
    """cuSPARSE's product of single values; torch's float32 BSR product is Triton's again."""
    torch = torch_on_gpu()
    w, operand, out, y = _from_the_left(problem, product)
    w = w.to_dense().to_sparse_csr()
    crow, column = w.crow_indices().int(), w.col_indices().int()
    w = torch.sparse_csr_tensor(crow, column, w.values(), size=w.shape)
    compute = partial(torch.addmm, y, w, operand, beta=0, out=y)
    return Contestant(compute, columns_of, record_torch, out)


def _from_the_left(problem: Problem, product: str) -> tuple[Any, Any, DeviceArray, Any]:
    """(w.T or w, the operand feature-major, the output, its view in torch)."""
    forward = product == "forward"
    operand, like = (problem.x, problem.dy) if forward else (problem.dy, problem.x)
    out = empty(like.shape[::-1], like.dtype)
    w = bsr_tensor(problem.layout, as_torch(problem.values.device), forward)
    return w, as_torch(operand.device).T.contiguous(), out, as_torch(out)


def bsr_tensor(layout: Layout, blocks: Any, transposed: bool = False) -> Any:
    """A matrix of blocks as a sparse tensor of torch, which holds `blocks`; or its transpose."""
    torch, walk = torch_here(), layout.index.columns if transposed else layout.index.rows
    shape = [n * blocks.shape[1] for n in layout.shape]
    starts, indices, order = (torch.from_numpy(a.copy()).to(blocks.device) for a in walk)
    if transposed:
        blocks, shape = blocks[order.long()].transpose(1, 2).contiguous(), shape[::-1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that sparse BSR tensors are in beta
        return torch.sparse_bsr_tensor(starts, indices, blocks, size=shape)


def _cudnn(problem: Problem, product: str) -> Contestant:
    """A convolution, channels last, of a layout that keeps every block; it tries kernels first."""
    torch = torch_on_gpu()
    torch.backends.cudnn.allow_tf32 = problem.precision == "high"
    torch.backends.cudnn.benchmark = True
    x, dy = (as_torch(a.device).permute(0, 3, 1, 2) for a in (problem.x, problem.dy))
    size, k = problem.block_size, problem.taps_along
    features = problem.in_features, problem.out_features
    n_in, n_out = (n // size for n in features)
    blocks = as_torch(problem.values.device).view(k, k, n_in, n_out, size, size)
    w = blocks.permute(3, 5, 2, 4, 0, 1).reshape(*features[::-1], k, k)
    w = w.contiguous(memory_format=torch.channels_last)
    stride, padding = [problem.stride] * 2, [k // 2] * 2

    def compute() -> Any:
        if product == "forward":
            return torch.nn.functional.conv2d(x, w, stride=stride, padding=padding)
        wanted = (product == "input_grad", product == "weight_grad", False)
        how = stride, padding, [1, 1], False, [0, 0], 1
        found = torch.ops.aten.convolution_backward(dy, x, w, None, *how, wanted)
        return found[0] if product == "input_grad" else found[1]

    def pick(out: Any, picked: np.ndarray) -> np.ndarray:
        result = torch.as_tensor(out, device="cuda")
        if product != "weight_grad":
            return _host(result.reshape(-1, result.shape[-1])[_places(picked)])
        # (out_features, k, k, in_features), as blocks (k, k, n_in, n_out, size, size)
        dw = result.view(n_out, size, k, k, n_in, size).permute(2, 3, 4, 0, 5, 1)
        return _host(dw.reshape(-1, size, size)[_places(picked)])

    return Contestant(lambda: compute().permute(0, 2, 3, 1), pick, record_torch)


def _numpy(problem: Problem, product: str) -> Contestant:
    x, dy, dense = problem.x.host, problem.dy.host, problem.w.toarray()
    if product == "weight_grad":
        return Contestant(lambda: x.T @ dy, lambda dw, b: kept(dw, problem.layout)[b])
    operand, matrix = (x, dense) if product == "forward" else (dy, dense.T)
    return Contestant(lambda: operand @ matrix, rows_of)


def kept(dense: np.ndarray, layout: Layout) -> np.ndarray:
    """The kept blocks of a dense matrix, (n_blocks, B, B)."""
    size = dense.shape[0] // layout.shape[0]
    return BlockSparse.from_dense(dense, layout, block_size=size).values


def _numpy_by_block(problem: Problem, product: str) -> Contestant:
    """The weight-gradient as a small dense product for each kept block."""
    x, dy, size, index = problem.x.host, problem.dy.host, problem.block_size, problem.layout.index

    def compute() -> np.ndarray:
        blocks = np.empty_like(problem.w.values)
        places = zip(index.block_rows.tolist(), index.block_columns.tolist(), strict=True)
        for b, (row, column) in enumerate(places):
            x_rows, dy_columns = x[:, row * size :][:, :size], dy[:, column * size :][:, :size]
            np.matmul(x_rows.T, dy_columns, out=blocks[b])
        return blocks

    return Contestant(compute, rows_of)


def _scipy(problem: Problem, product: str) -> Contestant:
    sparse = problem.w.to_scipy()
    if product == "forward":
        return Contestant(lambda: problem.x.host @ sparse, rows_of)
    across = sparse.T
    return Contestant(lambda: problem.dy.host @ across, rows_of)


def _torch_on_cpu(problem: Problem, product: str) -> Contestant:
    torch, forward = torch_here(), product == "forward"
    left = bsr_tensor(problem.layout, torch.from_numpy(problem.values.host), forward)
    right = torch.from_numpy((problem.x if forward else problem.dy).host).T
    return Contestant(lambda: torch.mm(left, right), lambda y, rows: y.T.numpy()[rows])


def as_torch(array: DeviceArray) -> Any:
    """The same memory as a tensor."""
    torch = torch_on_gpu()
    bits = array.view(np.dtype(f"int{8 * array.itemsize}"))
    return torch.as_tensor(bits, device="cuda").view(getattr(torch, array.dtype.name))


def _places(indices: np.ndarray) -> Any:
    return torch_on_gpu().from_numpy(indices).cuda()


def _host(tensor: Any) -> np.ndarray:
    return tensor.float().cpu().numpy()
