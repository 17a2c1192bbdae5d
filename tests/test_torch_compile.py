"""numbsparse.torch under torch.compile: one graph, no break, and the same numbers."""

import shutil

import pytest
from conftest import needs_bfloat16
from torch_helpers import drawn, grads, layout, ns, nst, torch

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own parts

DOUBLE = {"dtype": torch.float64, "block_size": 4}
MODELS = {
    "Linear": (lambda: nst.Linear(10, 13, layout=layout(3, 4), **DOUBLE), (6, 10)),
    "Conv2d": (lambda: nst.Conv2d(10, 13, 3, 2, 1, layout=layout(3, 4), **DOUBLE), (6, 10, 5, 4)),
    "LSTM": (lambda: nst.LSTM(10, 16, 2, layout=layout(4, 4), **DOUBLE), (6, 2, 10)),
}


@pytest.fixture(autouse=True)
def _forget():
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("name", MODELS)
def test_layers_in_one_graph(name):
    make, shape = MODELS[name]
    model = make()
    graph = torch.compile(model, fullgraph=True, backend="aot_eager")
    for size in (shape[0], 3, 4, 3):  # the second size makes it dynamic
        x = drawn(size, *shape[1:])
        y, expected = graph(x), model(x)
        y, expected = (y, expected) if torch.is_tensor(y) else (y[0], expected[0])
        torch.testing.assert_close(y, expected)
        inputs = [x, *model.parameters()]
        torch.testing.assert_close(grads(y, inputs), grads(expected, inputs))


@pytest.mark.parametrize("padding", [1, "same", ((1, 2), (0, 1))], ids=str)
@pytest.mark.parametrize("of", [lambda f: f, torch.func.vmap], ids=["plain", "vmap"])
def test_images_of_all_sizes_are_of_one_graph(of, padding):
    """The first size has one of its own; with one for each, torch stops at eight."""
    layer, graphs = nst.Conv2d(8, 8, 3, 2, padding, block_size=4, dtype=torch.float64), []

    def note(graph, inputs):
        graphs.append(graph)
        return graph.forward

    both = of(layer)
    graph = torch.compile(both, fullgraph=True, backend=note)
    for size in (5, 6, 8, 9):
        x = drawn(*(1, 2, 8, size, size + 1)[of is not torch.func.vmap :])
        y, expected = graph(x), both(x)
        torch.testing.assert_close(y, expected)
        inputs = [x, *layer.parameters()]
        torch.testing.assert_close(grads(y, inputs), grads(expected, inputs))
    assert len(graphs) == 2


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("padding", [1, "same"], ids=str)
def test_a_convolution_is_exported_for_images_of_all_sizes(padding, strict):
    layer = nst.Conv2d(8, 8, 3, 2, padding, block_size=4, dtype=torch.float64)
    shapes = {"x": dict.fromkeys((2, 3), torch.export.Dim.AUTO)}
    program = torch.export.export(
        layer, (drawn(2, 8, 9, 10),), dynamic_shapes=shapes, strict=strict
    ).module()
    for size in (4, 5, 12):
        x = drawn(2, 8, size, size + 1)
        torch.testing.assert_close(program(x), layer(x))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch's own look at it
@pytest.mark.parametrize("name", MODELS)
def test_a_backward_that_is_compiled_of_what_was_not(name):
    """torch.compile has such where a graph breaks, and `compiled_autograd` is on."""
    compiled_autograd = pytest.importorskip("torch._dynamo.compiled_autograd")
    make, shape = MODELS[name]
    model, x = make(), drawn(*shape)
    y = model(x)
    y = y if torch.is_tensor(y) else y[0]
    expected = grads(y, [x, *model.parameters()])
    y = model(x)
    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        (y if torch.is_tensor(y) else y[0]).pow(2).sum().backward()
    torch.testing.assert_close([x.grad, *(p.grad for p in model.parameters())], [*expected])


@needs_bfloat16
def test_autocast_in_one_graph():
    linear, x = nst.Linear(8, 8, block_size=4), drawn(3, 8, dtype=torch.float32)
    graph = torch.compile(linear, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, expected = graph(x), linear(x)
    assert y.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(grads(y, [x, linear.weight]), grads(expected, [x, linear.weight]))


def test_functions_in_one_graph():
    kept, other = layout(3, 4), layout(3, 4, seed=1)
    x, values = drawn(5, 12), drawn(kept.n_blocks, 4, 4)

    def both(x, values, layout):
        w = nst.BlockSparse(values, layout)  # made inside what is traced
        s = nst.sddmm(x.T, nst.matmul(x, w), w)
        s.values = s.values + nst.sddmm(x.T, nst.matmul(x, w), layout).values
        return nst.matmul(nst.matmul(x, s), w.T), nst.matmul(w.T, x.T, precision="high")

    graph = torch.compile(both, fullgraph=True, backend="aot_eager")
    for of in (kept, other, kept):  # a graph is of its layout
        y, expected = graph(x, values, of), both(x, values, of)
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(grads(y, [x, values]), grads(expected, [x, values]))


def test_a_layout_is_a_constant_for_torch():
    leaves, of = torch.utils._pytree.tree_flatten(layout(3, 4))
    assert (leaves, of.unflatten([])) == ([], layout(3, 4))


def test_the_sign_of_a_product_breaks_the_graph_and_is_right():
    kept = layout(3, 3)
    w, x = nst.BlockSparse(drawn(kept.n_blocks, 4, 4), kept), drawn(12, 12)
    for product in (lambda: x @ w, lambda: w @ x, lambda: x @ w.T):
        torch.testing.assert_close(torch.compile(product, backend="aot_eager")(), product())


def test_another_layout_in_the_same_module():
    layer, other = (nst.Linear(12, 16, layout=layout(3, 4, seed=i), **DOUBLE) for i in range(2))
    graph, x = torch.compile(layer, fullgraph=True, backend="aot_eager"), drawn(2, 12)
    graph(x)
    nst.adopt_layouts_(layer, other.state_dict())
    layer.load_state_dict(other.state_dict())
    torch.testing.assert_close(graph(x), other(x))


def test_precision_that_is_set_later():
    layer, x = nst.Linear(12, 16, block_size=4), drawn(2, 12, dtype=torch.float32)
    seen = []

    def note(module, examples):
        seen.extend(node.args[-1] for node in module.graph.nodes if node.op == "call_function")
        return module

    graph = torch.compile(layer, fullgraph=True, backend=note)
    graph(x)
    with ns.set_precision("high"):
        graph(x)
    assert [word for word in seen if isinstance(word, str)] == ["highest", "high"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor takes a C++ compiler")
def test_inductor_and_a_training_step():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        nst.Linear(16, 32, layout=layout(4, 8), block_size=4),
        torch.nn.GELU(),
        torch.nn.Linear(32, 4),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    x, wanted = drawn(64, 16, dtype=torch.float32, grad=False), torch.arange(64) % 4
    graph = torch.compile(
        lambda: torch.nn.functional.cross_entropy(model(x), wanted), fullgraph=True
    )
    losses = []
    for _ in range(30):
        loss = graph()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
