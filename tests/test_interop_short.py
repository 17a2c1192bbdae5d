"""Arrays of torch and CuPy read by their attributes are those that the protocols lend."""

import numpy as np
import pytest

import numbsparse as ns
from numbsparse import device
from numbsparse.device import cupy_arrays, interop, torch_tensors

pytestmark = pytest.mark.skipif(
    device.SIMULATED or not device.is_available(), reason="no GPU; the simulator has no libraries"
)

X = np.random.default_rng(0).standard_normal((5, 8), dtype=np.float32)
W = ns.BlockSparse(np.random.default_rng(1).standard_normal((2, 8, 8), dtype=np.float32), [[1, 1]])
WAYS = {"torch": torch_tensors, "cupy": cupy_arrays}

ODD = {
    "plain": lambda x: x * 1,
    "from the middle on": lambda x: x[1:, 4:],
    "transposed": lambda x: x.T,
    "of one row, any stride": lambda x: x[:, None, :4],
    "of one number": lambda x: x.sum(),
    "empty": lambda x: x[:0, :4],
}


def on_gpu(library):
    module = pytest.importorskip(library)
    return module.from_numpy(X).cuda() if library == "torch" else module.asarray(X)


def assert_both_ways_agree(library, x, monkeypatch):
    quick = device.as_device_array(x)
    monkeypatch.setattr(WAYS[library], "read", lambda x: None)
    slow = device.as_device_array(x)
    for what in ("address", "shape", "dtype"):
        assert getattr(quick, what) == getattr(slow, what), what
    if quick.size:
        assert quick.is_contiguous == slow.is_contiguous
        assert quick.strides == slow.strides
    np.testing.assert_array_equal(quick.numpy(), slow.numpy())
    return quick


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("library", WAYS)
def test_arrays_in_odd_ways(library, name, monkeypatch):
    x = ODD[name](on_gpu(library))
    assert WAYS[library].read(x).owner is x
    assert_both_ways_agree(library, x, monkeypatch)


@pytest.mark.parametrize("dtype", ["float16", "int64", "uint8", "bool"])
@pytest.mark.parametrize("library", WAYS)
def test_dtypes(library, dtype, monkeypatch):
    module, x = pytest.importorskip(library), on_gpu(library) > 0
    x = x.to(getattr(module, dtype)) if library == "torch" else x.astype(dtype)
    assert WAYS[library].read(x).dtype == dtype
    assert_both_ways_agree(library, x, monkeypatch)


@pytest.mark.parametrize("make", ["Parameter", "a tape's", "a subclass's"])
def test_other_tensors_of_torch(make, monkeypatch):
    torch, x = pytest.importorskip("torch"), on_gpu("torch")
    if make == "Parameter":
        x = torch.nn.Parameter(x)
    elif make == "a tape's":
        x = x.requires_grad_() * 1
    else:
        x = x.as_subclass(type("Strange", (torch.Tensor,), {}))
    if make != "a subclass's":
        with pytest.raises(ValueError, match="x requires grad"):
            ns.matmul(x, W.to("cuda"))
    with torch.no_grad():
        assert (torch_tensors.read(x) is None) == (make == "a subclass's")
        assert_both_ways_agree("torch", x, monkeypatch)


def test_work_on_a_side_stream_of_torch_is_waited_for():
    torch = pytest.importorskip("torch")
    x = torch.zeros(4096, 4096, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        for _ in range(20):
            x = x @ x
        x += 1
        assert torch_tensors.read(x) is None
        assert (device.as_device_array(x).numpy() == 1).all()


def test_work_on_a_side_stream_of_cupy_is_left_to_the_protocols():
    cupy, x = pytest.importorskip("cupy"), on_gpu("cupy")
    with cupy.cuda.Stream(non_blocking=True):
        assert cupy_arrays.read(x) is None
        np.testing.assert_array_equal(device.as_device_array(x).numpy(), X)


@pytest.mark.parametrize("library", WAYS)
def test_results_are_made_by_the_library(library, monkeypatch):
    x, w = on_gpu(library), W.to("cuda")

    def refuse(*args, **options):
        raise AssertionError("made by the protocols")

    with monkeypatch.context() as patch:
        patch.setattr(interop, "in_library_of", refuse)
        y = ns.matmul(x, w)
    assert type(y) is type(x)
    assert device.as_device_array(y).owner is y
    np.testing.assert_allclose(device.as_device_array(y).numpy(), X @ W.toarray(), atol=1e-5)


@pytest.mark.parametrize("library", WAYS)
def test_without_memory_of_the_library_results_are_of_ours(library, monkeypatch):
    module, x, w = pytest.importorskip(library), on_gpu(library), W.to("cuda")

    def refuse(*args, **options):
        raise module.OutOfMemoryError("out") if library == "torch" else MemoryError("out")

    y = ns.matmul(x, w)
    if library == "torch":
        monkeypatch.setattr(torch_tensors, "new_empty", refuse)
    else:
        monkeypatch.setattr(module, "empty", refuse)
    again = ns.matmul(x, w)
    assert type(again) is type(x)
    assert bool((again == y).all())
