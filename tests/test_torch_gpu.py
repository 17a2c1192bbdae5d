"""numbsparse.torch on a real GPU: what the CPU gives, on any stream, with nothing copied."""

import pytest
from torch_helpers import drawn, grads, layout, ns, nst, torch

pytestmark = [
    pytest.mark.gpu(reason="the simulator takes no array of torch"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this torch has no CUDA"),
]
LAYERS = {
    "Linear": (
        lambda **how: nst.Linear(64, 96, layout=layout(4, 6), block_size=16, **how),
        (5, 64),
    ),
    "Conv2d": (
        lambda **how: nst.Conv2d(64, 96, 3, 2, 1, layout=layout(4, 6), block_size=16, **how),
        (2, 64, 6, 5),
    ),
    "LSTM": (
        lambda **how: nst.LSTM(64, 96, 2, layout=layout(6, 6), block_size=16, **how),
        (4, 3, 64),
    ),
}


def results(layer, x):
    y = layer(x)
    y = y if torch.is_tensor(y) else y[0]
    return y, *grads(y.float(), [x, *layer.parameters()])


@pytest.mark.parametrize("side_stream", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_give_what_they_give_on_the_cpu(name, side_stream):
    make, shape = LAYERS[name]
    layer, x = make(), drawn(*shape, dtype=torch.float32)
    expected = results(layer, x)
    layer, x = layer.cuda(), x.detach().cuda().requires_grad_()
    stream = torch.cuda.Stream() if side_stream else torch.cuda.default_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # memory is used again
            got = [part.cpu() for part in results(layer, x)]
    torch.testing.assert_close(got, list(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_autocast(name, dtype):
    make, shape = LAYERS[name]
    layer, x = make(device="cuda"), drawn(*shape, dtype=torch.float32).detach().cuda()
    x.requires_grad_()
    expected = results(layer, x)
    with torch.autocast("cuda", dtype=dtype):
        got = results(layer, x)
    assert got[0].dtype == dtype
    assert {part.dtype for part in got[1:]} == {torch.float32}
    for one, other in zip(got, expected, strict=True):
        assert (one.float() - other).abs().max() < 0.1 * (1 + other.abs().max())


@pytest.mark.parametrize("name", LAYERS)
def test_operators_in_one_graph(name):
    make, shape = LAYERS[name]
    layer = make(device="cuda")
    x = drawn(*shape, dtype=torch.float32).detach().cuda().requires_grad_()
    graph = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(results(graph, x)[0], results(layer, x)[0])


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")  # on purpose
def test_products_that_come_again_are_started_on_what_is_there_now():
    kept = layout(4, 6)
    values = torch.empty(kept.n_blocks, 16, 16, device="cuda", requires_grad=True)
    w, ours = nst.BlockSparse(values, kept), ns.BlockSparse(values.detach(), kept)
    x = torch.empty(8, 64, device="cuda", requires_grad=True)
    out = torch.empty(8, 96, device="cuda")
    dense, side = torch.empty(64, 96, device="cuda"), torch.cuda.Stream()
    for seed in range(6):
        generator = torch.Generator("cuda").manual_seed(seed)
        with torch.no_grad():
            for tensor in (x, values):
                tensor.copy_(torch.randn(tensor.shape, device="cuda", generator=generator))
            dense.copy_(w.to_dense())
        out.fill_(float("nan"))
        for stream in (torch.cuda.current_stream(), side):
            stream.wait_stream(torch.cuda.default_stream())
            with torch.cuda.stream(stream):
                for rows in (x, x[:4], x[1:5]):
                    y = nst.matmul(rows, w)
                    got = torch.autograd.grad(y.square().sum(), [x, values])
                    expected = torch.autograd.grad(
                        (rows @ w.to_dense()).square().sum(), [x, values]
                    )
                    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)
                    with torch.no_grad():
                        ns.matmul(rows, ours, out=out[: len(rows)])
                        torch.testing.assert_close(
                            out[: len(rows)], rows @ dense, rtol=1e-4, atol=1e-4
                        )
                torch.cuda.synchronize()
    found = [replay for replay in kept.device_index.replays.values() if replay]
    assert len(found) >= 6
    address, alive = out.data_ptr(), torch.cuda.memory_allocated()
    del out, y, got, expected
    assert torch.cuda.memory_allocated() < alive, address


def test_what_requires_grad_is_not_taken_without_it():
    x = torch.ones(2, 64, device="cuda", requires_grad=True)
    kept = layout(4, 6)
    w = ns.BlockSparse(torch.ones(kept.n_blocks, 16, 16, device="cuda"), kept)
    for _ in range(4):
        with torch.no_grad():
            y = ns.matmul(x, w)
        with pytest.raises(ValueError, match="x requires grad"):
            ns.matmul(x, w)
        with pytest.raises(ValueError, match="out requires grad"):
            ns.matmul(x.detach(), w, out=torch.ones_like(y).requires_grad_())


def test_what_is_known_is_started_for_plain_tensors_in_no_mode_alone():
    kept = layout(4, 6)
    w = nst.BlockSparse(drawn(kept.n_blocks, 16, 16, dtype=torch.float32).detach().cuda(), kept)
    x = drawn(8, 64, dtype=torch.float32).detach().cuda()
    dense = w.to_dense()

    def close(got, expected, tolerance=1e-4):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)

    for _ in range(4):
        close(x @ w, x @ dense)  # known from the third on
        close(torch._neg_view(x) @ w, -x @ dense)
        close(torch.vmap(lambda row: row @ w)(x), x @ dense)
        with torch.inference_mode():
            close(x @ w, x @ dense)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = x @ w
        assert y.dtype == torch.bfloat16
        close(y.float(), x @ dense, 0.1)
        with pytest.raises(TypeError, match="one dtype"):
            x.half() @ w
        with pytest.raises(ValueError, match="x takes the shape"):
            x.view(16, 32) @ w
    graph, out = torch.cuda.CUDAGraph(), None
    with torch.cuda.graph(graph):
        out = x @ w
    x.mul_(2)
    graph.replay()
    close(out, x @ dense)
