"""numbsparse.torch on a real GPU: what the CPU gives, on any stream, with nothing copied."""

import pytest
from torch_helpers import drawn, grads, layout, nst, torch

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
