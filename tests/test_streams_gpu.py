"""Work on streams, on a real GPU: a long kernel goes first, so that a missing order is seen."""

import gc

import numpy as np
import pytest
from streams_gpu_helpers import LAYOUT, ROWS, B, N, delay, drawn, own, weight

import numbsparse as ns
from numbsparse import device
from numbsparse.nn import functional as F
from numbsparse.nn import optim

pytestmark = pytest.mark.gpu(reason="test_streams.py has a model of a GPU's streams")


def of_cuda_core():
    return device.runtime.current_device().create_stream()


def handle_of_cuda_core():
    return int(_kept_alive(of_cuda_core()).handle)


def of_torch():
    torch = pytest.importorskip("torch")
    return torch.cuda.Stream()


def of_cupy():
    return pytest.importorskip("cupy").cuda.Stream(non_blocking=True)


def of_cupy_that_takes_turns():
    return pytest.importorskip("cupy").cuda.Stream()


_alive = []


def _kept_alive(stream):
    _alive.append(stream)
    return stream


KINDS = [
    own, of_cuda_core, handle_of_cuda_core, of_torch, of_cupy, of_cupy_that_takes_turns
]  # fmt: skip


PRODUCTS = {
    "forward": lambda x, y, w: ns.matmul(x, w),
    "input-gradient": lambda x, y, w: ns.matmul(y, w.T),
    "features first": lambda x, y, w: w.T @ x.T,
    "weight-gradient": lambda x, y, w: ns.sddmm(x.T, y, w).values,
}
CASES = [  # each kind of stream meets each product, each product both dtypes
    (make, product, ("float32", "float16")[(i + j) % 2])
    for i, make in enumerate(KINDS)
    for j, product in enumerate(PRODUCTS)
]


@pytest.mark.parametrize(
    ("make", "product", "dtype"), CASES, ids=lambda part: getattr(part, "__name__", part)
)
def test_a_product_is_in_order_on_its_stream(make, product, dtype):
    w, run = weight(dtype).to("cuda"), PRODUCTS[product]
    hosts = drawn(ROWS["few"], N, dtype=dtype), drawn(ROWS["few"], N, dtype=dtype, seed=2)
    x, y = map(ns.to_device, hosts)
    expected = run(x, y, w).numpy()
    dense, wide = w.to("cpu").astype("float64"), [a.astype(np.float64) for a in hosts]
    if product == "forward":
        error = 1e-4 if dtype == "float32" else 0.2
        np.testing.assert_allclose(expected, wide[0] @ dense.toarray(), atol=error, rtol=0.02)
    ns.synchronize()
    stream = ns.stream(make())
    stream.wait()
    with stream:
        delay()
        inputs = [device.empty(a.shape, a.dtype) for a in (x, y)]
        for target, source in zip(inputs, (x, y), strict=True):
            device.refill(target, source)
        got = run(*inputs, w)
    np.testing.assert_array_equal(got.numpy(), expected)  # which waits for the stream


def busy(handle):
    from cuda.bindings import driver

    (error,) = driver.cuStreamQuery(handle)
    return error == driver.CUresult.CUDA_ERROR_NOT_READY


def test_work_goes_to_the_stream_and_nowhere_else():
    x, w = ns.to_device(drawn(64, N)), weight().to("cuda")
    stream = ns.stream(of_cuda_core())
    with stream:
        ns.matmul(x, w)  # compiled, planned
        ns.synchronize()
        ns.stream(1).synchronize()
        delay()
        ns.matmul(x, w)
        assert busy(stream.handle), "the GPU is too fast for this test: raise STEPS"
        assert not busy(1), "work went to the legacy default stream"
        ns.synchronize()
        assert not busy(stream.handle)


@pytest.mark.parametrize("how", ["a kernel", "to the host", "as a tensor of torch"])
def test_what_another_stream_made_is_waited_for(how):
    w, expected = weight().to("cuda"), ns.matmul(ns.to_device(drawn(64, N)), weight().to("cuda"))
    made, reader, source = of_cuda_core(), of_cuda_core(), ns.to_device(drawn(64, N))
    ns.synchronize()
    with ns.stream(made):
        delay()
        x = device.empty((64, N), "float32")
        device.refill(x, source)
    if how == "a kernel":
        with ns.stream(reader):
            y = ns.matmul(x, w)
        np.testing.assert_array_equal(y.numpy(), expected.numpy())
    elif how == "to the host":
        np.testing.assert_array_equal(x.numpy(), source.numpy())
    else:
        torch = pytest.importorskip("torch")
        with torch.cuda.stream(torch.cuda.Stream()):
            got = torch.from_dlpack(x).clone()
            torch.cuda.current_stream().synchronize()
        np.testing.assert_array_equal(got.cpu().numpy(), source.numpy())


@pytest.mark.parametrize("size", [1000, 3_000_000], ids=["kept here", "of CUDA's pool"])
def test_memory_is_not_given_away_while_another_stream_reads_it(size):
    first, second = ns.stream(of_cuda_core()), ns.stream(of_cuda_core())
    with first:
        array = device.empty((size,), "float32")
        device.refill(array, drawn(size))
        address = array.address
    with second:
        delay()
        out = device.empty((size,), "float32")
        device.refill(out, array)
    del array
    gc.collect()
    with first:
        other = device.empty((size,), "float32")
        if size == 1000:
            assert other.address == address, "the test needs the same memory"
        device.refill(other, np.zeros(size, np.float32))
    np.testing.assert_array_equal(out.numpy(), drawn(size))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_products_of_one_layout_side_by_side(dtype):
    # Lines are cut and joined through memory that the plan holds.
    pattern = np.zeros((64, 4), bool)
    pattern[:, 0] = pattern[::7] = True
    values = drawn(int(pattern.sum()), B, B, dtype=dtype)
    w = ns.BlockSparse(values, pattern).to("cuda")
    inputs = [ns.to_device(drawn(32, 64 * B, dtype=dtype, seed=i)) for i in range(2)]
    expected = [ns.matmul(x, w).numpy() for x in inputs]
    pair = [ns.stream(of_cuda_core()) for _ in inputs]
    outs = [[device.empty((32, 4 * B), dtype) for _ in range(60)] for _ in inputs]
    ns.synchronize()
    for stream in pair:
        with stream:
            delay()
    for k in range(60):
        for stream, x, out in zip(pair, inputs, outs, strict=True):
            with stream:
                ns.matmul(x, w, out=out[k])
    for stream in pair:
        stream.synchronize()
    for out, right in zip(outs, expected, strict=True):
        wrong = sum(not np.array_equal(y.numpy(), right) for y in out)
        assert not wrong, f"{wrong} of {len(out)} products were disturbed by another stream"


def test_a_layout_met_first_on_a_side_stream():
    x = ns.to_device(drawn(64, N))
    for i in range(3):  # each a new layout, whose index and plans go to the GPU now
        w = ns.BlockSparse(drawn(12 + i, B, B), _pattern_of(12 + i)).to("cuda")
        stream, other = ns.stream(of_cuda_core()), ns.stream(of_cuda_core())
        with stream:
            delay()
            y = ns.matmul(x, w)
        with other:  # its plans are on their way on the first stream
            z = ns.matmul(x, w)
            right = z.numpy()
        np.testing.assert_array_equal(y.numpy(), right)
        np.testing.assert_allclose(right, x.numpy() @ w.to("cpu").toarray(), atol=1e-3)


def _pattern_of(count):
    pattern = np.zeros(64, bool)
    pattern[np.random.default_rng(count).permutation(64)[:count]] = True
    return pattern.reshape(8, 8)


def make_training():
    layer = ns.nn.Linear(N, N, layout=LAYOUT, block_size=B, seed=0).to("cuda")
    optimizer = optim.Adam(layer.parameters())

    def step(x, target):
        loss = F.mse_loss(layer(x), target)
        layer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def test_a_captured_step_stays_on_its_stream_and_is_in_order_on_others():
    inputs = [(drawn(64, N, seed=i), drawn(64, N, seed=10 + i)) for i in range(6)]
    plain = make_training()
    expected = [float(plain(*map(ns.to_device, pair)).data) for pair in inputs]
    step = ns.graph(make_training())
    home, other = ns.stream(of_cuda_core()), ns.stream(of_cuda_core())
    got = []
    for i, pair in enumerate(inputs):
        with home if i < 3 or i == 4 else other:
            delay()
            got.append(step(*map(ns.to_device, pair)).data)
    assert step.captures == 1
    assert [float(loss) for loss in got] == expected


LIBRARIES = ["torch", "cupy"]


class Library:
    """A library's own stream, kept busy, and what is made on it after."""

    def __init__(self, name):
        self.name, self.module = name, pytest.importorskip(name)
        self.stream = of_torch() if name == "torch" else of_cupy()

    def working(self):
        return self.module.cuda.stream(self.stream) if self.name == "torch" else self.stream

    def array(self, host):
        if self.name == "cupy":
            return self.module.asarray(host)
        return self.module.from_numpy(host).cuda()

    def late_copy(self, x):
        """A copy of x that the stream makes after a while."""
        with ns.stream(self.stream):
            delay()
        return x.clone() if self.name == "torch" else x.copy()

    def numpy(self, x):
        return x.cpu().numpy() if self.name == "torch" else x.get()


@pytest.mark.parametrize("explicit", [False, True], ids=["on theirs", "within ns.stream"])
@pytest.mark.parametrize("name", LIBRARIES)
def test_products_of_other_libraries_are_in_order_with_them(name, explicit):
    library, w, host = Library(name), weight().to("cuda"), drawn(64, N)
    source = library.array(host)
    expected = ns.matmul(ns.to_device(host), w).numpy()
    gradient = ns.sddmm(ns.to_device(host).T, ns.to_device(expected), w).values.numpy()
    ns.synchronize()
    context = ns.stream(of_cuda_core()) if explicit else device.current_stream()
    with library.working(), context:
        for _ in range(2):
            x = library.late_copy(source)
            y = ns.matmul(x, w)
            assert type(y) is type(x)
            after = y * 1  # on the library's stream: after the product
            dw = ns.sddmm(x.T, y, w).values
            del x, y  # memory that the library gives to the next
        got = library.numpy(after)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(dw.numpy(), gradient)


# torch's graphs
