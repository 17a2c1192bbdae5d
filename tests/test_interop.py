"""Arrays of torch, CuPy, JAX and Numba on a real GPU, in and out without a copy."""

import subprocess
import sys

import numpy as np
import pytest
from conftest import HALVES, host, needs_bfloat16

import numbsparse as ns
from numbsparse import device
from numbsparse.dtypes import as_dtype, finfo

pytestmark = pytest.mark.skipif(
    device.SIMULATED or not device.is_available(), reason="no GPU; the simulator has no libraries"
)

X = np.random.default_rng(0).standard_normal((5, 8), dtype=np.float32)
W = ns.BlockSparse(np.random.default_rng(1).standard_normal((2, 8, 8), dtype=np.float32), [[1, 1]])


def make(library, array):
    if library == "torch":
        torch = pytest.importorskip("torch")
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16).cuda()
        return torch.from_numpy(array).cuda()
    if library == "numba" and array.dtype.name == "bfloat16":
        pytest.skip("Numba's arrays know no bfloat16")
    if library == "cupy":
        return pytest.importorskip("cupy").asarray(array)
    if library == "jax":
        return pytest.importorskip("jax").numpy.asarray(array)
    return pytest.importorskip("numba.cuda").to_device(array)


def address(x):
    return device.as_device_array(x).address


def to_numpy(x):
    if hasattr(x, "detach"):
        x = x.float() if str(x.dtype) == "torch.bfloat16" else x
        return x.detach().cpu().numpy()
    return x.get() if hasattr(x, "get") else host(x)


@pytest.mark.parametrize("dtype", ["float32", *HALVES])
@pytest.mark.parametrize("side", ["x @ w", "w @ x"])
@pytest.mark.parametrize("library", ["torch", "cupy", "jax", "numba"])
def test_operand_and_result(library, side, dtype):
    dtype = as_dtype(dtype)
    w = W.astype(dtype).to("cuda")
    if side == "x @ w":
        x = make(library, X.astype(dtype))
        y, axis = ns.matmul(x, w), 0
    else:
        x = make(library, np.ascontiguousarray(X.astype(dtype).T))
        y, axis = ns.matmul(w.T, x), 1
    assert type(y) is (ns.DeviceArray if library == "numba" else type(x))
    assert y.dtype == (x.dtype if library == "torch" else dtype)
    assert y.shape[axis] == 5
    exact, dense = X.astype(dtype).astype(float), w.toarray().astype(float)
    expected, terms = exact @ dense, exact.shape[1]
    bound = (terms + 2) * np.finfo(np.float32).eps * (abs(exact) @ abs(dense))  # of float32 sums
    bound += float(finfo(dtype).eps) * abs(expected)
    got = np.moveaxis(to_numpy(y).astype(float), axis, 0)
    assert (abs(got - expected) <= bound).all()
    assert address(y) % 16 == 0


@pytest.mark.parametrize("library", ["torch", "cupy", "jax", "numba"])
def test_nothing_is_copied(library):
    x = make(library, X)
    assert address(x) == address(device.as_device_array(x))
    w = ns.BlockSparse(make(library, W.data), W.layout)
    np.testing.assert_array_equal(w.toarray(), W.toarray())


@pytest.mark.parametrize("library", ["torch", "cupy", "numba"])
def test_out(library):
    x = make(library, X)
    out = make(library, np.full((5, 16), np.nan, np.float32))
    assert ns.matmul(x, W.to("cuda"), out=out) is out
    result = out.copy_to_host() if library == "numba" else to_numpy(out)
    np.testing.assert_allclose(result, X @ W.toarray(), atol=1e-5)


def test_strided_torch_tensor():
    torch = pytest.importorskip("torch")
    base = torch.from_numpy(np.ascontiguousarray(X.T)).cuda()
    y = ns.matmul(base.T, W.to("cuda"))
    np.testing.assert_allclose(to_numpy(y), X @ W.toarray(), atol=1e-5)


def test_torch_tensor_that_requires_a_gradient():
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(X).cuda().requires_grad_()
    with torch.no_grad():
        y = ns.matmul(x, W.to("cuda"))
    np.testing.assert_allclose(to_numpy(y), X @ W.toarray(), atol=1e-5)
    with pytest.raises(ValueError, match="x requires grad"):
        ns.matmul(x, W.to("cuda"))


def test_a_torch_view_with_another_sign_is_refused():
    torch = pytest.importorskip("torch")
    x = torch.ones(5, 8, dtype=torch.complex64, device="cuda").conj().imag
    with pytest.raises(ValueError, match=r"x is a view with another sign: pass x.resolve_neg\(\)"):
        ns.matmul(x, W.to("cuda"))


def test_a_torch_dtype_that_numpy_lacks():
    torch = pytest.importorskip("torch")
    x = torch.ones(5, 8, device="cuda").to(torch.float8_e5m2)
    with pytest.raises(TypeError, match="x"):
        ns.matmul(x, W.to("cuda"))


@needs_bfloat16
@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_bfloat16_out_and_gradients(library):
    bfloat16 = as_dtype("bfloat16")
    x, dy = make(library, X.astype(bfloat16)), make(library, np.ones((5, 16), bfloat16))
    out = make(library, np.full((5, 16), np.nan, bfloat16))
    w = W.astype(bfloat16).to("cuda")
    assert ns.matmul(x, w, out=out) is out
    exact = X.astype(bfloat16).astype(float) @ w.toarray().astype(float)
    assert abs(to_numpy(out).astype(float) - exact).max() < 2.0**-6
    weight = ns.Tensor(w, requires_grad=True)
    ns.matmul(ns.Tensor(x), weight).backward(ns.Tensor(dy))
    exact = X.astype(bfloat16).astype(float).sum(0)[:, None].repeat(16, 1)
    assert abs(weight.grad.numpy().astype(float) - exact).max() < 2.0**-6


@needs_bfloat16
def test_a_bfloat16_tensor_without_ml_dtypes_says_what_is_missing():
    pytest.importorskip("torch")
    code = """
import sys
sys.modules["ml_dtypes"] = None
import torch, numbsparse as ns
try:
    ns.Tensor(torch.zeros(3, dtype=torch.bfloat16, device="cuda"))
except TypeError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert "data has a dtype that NumPy does not know here, torch.bfloat16" in run.stdout, run
    assert "pip install 'numbsparse[bfloat16]'" in run.stdout


@pytest.mark.parametrize("dtype", ["float32", *HALVES])
@pytest.mark.parametrize("library", ["torch", "cupy", "jax"])
def test_a_device_array_goes_out_through_dlpack(library, dtype):
    module = pytest.importorskip(library)
    array = ns.to_device(X.astype(as_dtype(dtype)))
    from_dlpack = module.dlpack.from_dlpack if library == "jax" else module.from_dlpack
    there = from_dlpack(array)
    assert address(there) == array.address
    del array  # the other library keeps the memory alive
    got = np.asarray(there) if library == "jax" else to_numpy(there)
    np.testing.assert_array_equal(got.astype(float), X.astype(as_dtype(dtype)).astype(float))
    assert dtype in str(there.dtype)


def test_work_of_torch_is_waited_for():
    torch = pytest.importorskip("torch")
    w = ns.BlockSparse(np.eye(32, dtype=np.float32)[None], [[1]]).to("cuda")
    x = torch.zeros(1 << 16, 32, device="cuda")
    for i in range(20):
        x += 1
        y = ns.matmul(x, w)
        assert (y == i + 1).all().item()
