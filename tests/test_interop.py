"""Arrays of torch, CuPy, JAX and Numba on a real GPU, in and out without a copy."""

import numpy as np
import pytest
from conftest import host

import numbsparse as ns
from numbsparse import device

pytestmark = pytest.mark.skipif(
    device.SIMULATED or not device.is_available(), reason="no GPU; the simulator has no libraries"
)

X = np.random.default_rng(0).standard_normal((5, 8), dtype=np.float32)
W = ns.BlockSparse(np.random.default_rng(1).standard_normal((2, 8, 8), dtype=np.float32), [[1, 1]])


def make(library, array):
    if library == "torch":
        return pytest.importorskip("torch").from_numpy(array).cuda()
    if library == "cupy":
        return pytest.importorskip("cupy").asarray(array)
    if library == "jax":
        return pytest.importorskip("jax").numpy.asarray(array)
    return pytest.importorskip("numba.cuda").to_device(array)


def address(x):
    return device.as_device_array(x).address


def to_numpy(x):
    if hasattr(x, "detach"):
        return x.detach().cpu().numpy()
    return x.get() if hasattr(x, "get") else host(x)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("library", ["torch", "cupy", "jax", "numba"])
def test_operand_and_result(library, dtype):
    x, w = make(library, X.astype(dtype)), W.astype(dtype).to("cuda")
    y = ns.matmul(x, w)
    assert type(y) is (type(x) if library in ("torch", "cupy") else ns.DeviceArray)
    expected = X.astype(dtype).astype(float) @ w.toarray().astype(float)
    assert abs(to_numpy(y) - expected).max() < 30 * np.finfo(dtype).eps


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
    np.testing.assert_allclose(to_numpy(ns.matmul(x, W.to("cuda"))), X @ W.toarray(), atol=1e-5)


@pytest.mark.parametrize("library", ["torch", "cupy", "jax"])
def test_a_device_array_goes_out_through_dlpack(library):
    module = pytest.importorskip(library)
    array = ns.to_device(X)
    from_dlpack = module.dlpack.from_dlpack if library == "jax" else module.from_dlpack
    there = from_dlpack(array)
    assert address(there) == array.address
    del array  # the other library keeps the memory alive
    np.testing.assert_array_equal(np.asarray(there) if library == "jax" else to_numpy(there), X)


def test_work_of_torch_is_waited_for():
    torch = pytest.importorskip("torch")
    w = ns.BlockSparse(np.eye(32, dtype=np.float32)[None], [[1]]).to("cuda")
    x = torch.zeros(1 << 16, 32, device="cuda")
    for i in range(20):
        x += 1
        y = ns.matmul(x, w)
        assert (y == i + 1).all().item()
