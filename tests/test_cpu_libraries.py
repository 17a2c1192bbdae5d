"""Arrays of torch and JAX on the CPU: what comes in comes out."""

import numpy as np
import pytest
from conftest import needs_bfloat16

import numbsparse as ns
from numbsparse import device
from numbsparse.dtypes import as_dtype


@pytest.mark.simulator
def test_torch_on_the_cpu():
    torch = pytest.importorskip("torch")
    w = ns.BlockSparse(torch.ones(2, 8, 8), np.eye(2))
    out = torch.full((4, 16), torch.nan)
    assert ns.matmul(torch.ones(4, 16), w, out=out) is out
    assert (out == 8).all()
    assert torch.equal(ns.matmul(torch.ones(4, 16), w), out)
    assert torch.equal(ns.matmul(w, torch.ones(16, 4)), out.T)
    if device.SIMULATED:  # else on a GPU, where the weight is
        assert torch.equal(ns.matmul(torch.ones(4, 16), w.to("cuda")), out)
    pixels = ns.conv(torch.ones(1, 2, 2, 16), w, kernel_size=1)
    assert torch.equal(pixels, torch.full((1, 2, 2, 16), 8.0))
    with pytest.raises(ValueError, match="out takes a writeable array, got list"):
        ns.matmul(np.ones((4, 16)), w.astype("float64"), out=np.ones((4, 16)).tolist())


def test_jax_on_the_cpu(monkeypatch):
    jax = pytest.importorskip("jax")
    monkeypatch.setattr(device.streams, "finish", None)  # nothing waits for a GPU, or needs one
    w = ns.BlockSparse(np.ones((2, 8, 8), np.float32), np.eye(2))
    x = jax.device_put(np.ones((4, 16), np.float32), jax.devices("cpu")[0])
    pixels = x.reshape(1, 2, 2, 16)
    for y in (
        ns.matmul(x, w),
        ns.matmul(x, w, gate=x[0, :2]),
        ns.matmul(w, x.T).T,
        ns.conv(pixels, w, kernel_size=1),
        ns.conv_transpose(pixels, w, kernel_size=1),
    ):
        assert isinstance(y, jax.Array)
        np.testing.assert_allclose(y.reshape(4, 16), np.full((4, 16), 8), rtol=0, atol=2e-5)
    for dw in (
        ns.sddmm(x.T, x, w),
        ns.conv_weight_grad(pixels, pixels, w, kernel_size=1),
    ):
        np.testing.assert_array_equal(dw.data, np.full((2, 8, 8), 4))


@needs_bfloat16
def test_torch_on_the_cpu_in_bfloat16():
    torch = pytest.importorskip("torch")
    values = torch.ones(2, 8, 8, dtype=torch.bfloat16)
    w, x = ns.BlockSparse(values, np.eye(2)), torch.ones(4, 16, dtype=torch.bfloat16)
    values.mul_(2)  # the memory is shared
    y = ns.matmul(x, w)
    assert (y.dtype, y.shape) == (torch.bfloat16, (4, 16))
    assert (y == 16).all()
    assert ns.Tensor(x).dtype == as_dtype("bfloat16")
    out = torch.zeros(4, 16, dtype=torch.bfloat16)
    assert ns.matmul(x, w, out=out) is out
    assert (out == 16).all()


def test_what_others_record_is_refused_with_the_room_that_takes_it():
    torch, jax = (pytest.importorskip(name) for name in ("torch", "jax"))
    w = ns.BlockSparse(np.ones((2, 8, 8), np.float32), np.eye(2))
    with pytest.raises(TypeError, match=r"got torch.Tensor \(numbsparse\.torch takes what torch"):
        torch.ones(4, 16, requires_grad=True) @ w
    with pytest.raises(TypeError, match=r"got jax\.\w+ \(numbsparse\.jax takes what jax"):
        jax.jit(lambda x: ns.matmul(x, w))(np.ones((4, 16), np.float32))
    with pytest.raises(TypeError, match=r"got str: |got str$|got str"):
        ns.matmul("x", w)
