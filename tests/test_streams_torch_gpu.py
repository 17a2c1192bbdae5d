"""CUDA graphs that torch captures, with our products in them."""

import copy
import gc
import subprocess
import sys

import numpy as np
import pytest
from streams_gpu_helpers import LAYOUT, ROWS, B, N, drawn, weight

import numbsparse as ns
from numbsparse import device

pytestmark = pytest.mark.gpu(reason="test_streams.py has a model of a GPU's streams")


def torch_layers():
    torch = pytest.importorskip("torch")
    nst = pytest.importorskip("numbsparse.torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA")
    return torch, nst


def linear(nst, dtype, layout=LAYOUT, size=B):
    return nst.Linear(N, N, layout=layout, block_size=size, device="cuda", dtype=dtype)


def forward_and_backward(layer, x, dy):
    y = layer(x)
    y = y if hasattr(y, "backward") else y[0]
    y.backward(dy)
    return y


def captured_by(torch, graph):
    """JAX's threads, where an earlier test loaded it, end a capture of seconds that minds them."""
    mode = "thread_local" if "jax" in sys.modules else "global"
    return torch.cuda.graph(graph, capture_error_mode=mode)


def check_capture(torch, layer, shape, dtype, warm_up=True):
    """Forward and backward in a graph: replayed on other inputs and weights, what eager gives."""
    x = torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_()
    with torch.no_grad():
        y = layer(x) if warm_up else None
    y = y if torch.is_tensor(y) or y is None else y[0]
    dy = torch.randn(x.shape if y is None else y.shape, device="cuda", dtype=dtype)
    leaves = [x, *layer.parameters()]
    if warm_up:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                forward_and_backward(layer, x, dy)
        torch.cuda.current_stream().wait_stream(side)
    for leaf in leaves:
        leaf.grad = None
    graph = torch.cuda.CUDAGraph()
    gc.collect()  # what earlier tests left in cycles is not freed in the capture, which that ends
    with captured_by(torch, graph):
        y = forward_and_backward(layer, x, dy)
    captured = [y.detach(), *(leaf.grad for leaf in leaves)]
    assert len({part.data_ptr() for part in captured}) == len(captured)
    for seed in range(3):
        generator = torch.Generator(device="cuda").manual_seed(seed)
        with torch.no_grad():
            for tensor in (*leaves, dy):
                tensor.copy_(torch.randn(tensor.shape, device="cuda", generator=generator) * 0.3)
        for part in captured:
            part.fill_(float("nan"))
        # Other work, in memory of its own and of ours, between capture and replay.
        torch.randn(1000, 1000, device="cuda").sum().item()
        graph.replay()
        got = [part.clone() for part in captured]
        twins = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        names = [name for name, _ in layer.named_parameters()]
        y = torch.func.functional_call(layer, dict(zip(names, twins[1:], strict=True)), twins[0])
        y = y if torch.is_tensor(y) else y[0]
        expected = [y.detach(), *torch.autograd.grad(y, twins, dy)]
        close = (
            {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
        )
        torch.testing.assert_close(got, expected, **close)


REGIMES = pytest.mark.parametrize(("rows", "dtype"), [("few", "float32"), ("many", "float16")])


@REGIMES
def test_torch_captures_a_linear_layer(rows, dtype):
    torch, nst = torch_layers()
    dtype = getattr(torch, dtype)
    check_capture(torch, linear(nst, dtype), (ROWS[rows], N), dtype)


@REGIMES
def test_torch_captures_a_layout_that_no_call_has_met(rows, dtype):
    torch, nst = torch_layers()
    dtype, shape = getattr(torch, dtype), (ROWS[rows], N)
    x = torch.ones(*shape, device="cuda", dtype=dtype, requires_grad=True)
    forward_and_backward(linear(nst, dtype), x, x.detach())  # compiles the kernels
    layer = linear(nst, dtype, ns.patterns.random(8, 8, 0.3, seed=len(rows)))
    check_capture(torch, layer, shape, dtype, warm_up=False)


def test_torch_captures_kernels_that_no_call_has_compiled():
    torch, nst = torch_layers()
    layer = linear(nst, torch.float32, ns.patterns.random(16, 16, 0.3, seed=0), size=16)
    check_capture(torch, layer, (48, N), torch.float32, warm_up=False)


@pytest.mark.parametrize("name", ["Conv2d", "LSTM"])
def test_torch_captures_other_layers(name):
    torch, nst = torch_layers()
    how = {"layout": ns.patterns.random(4, 4, 0.5, seed=0), "block_size": 16, "device": "cuda"}
    if name == "Conv2d":
        check_capture(torch, nst.Conv2d(64, 64, 3, 1, 1, **how), (2, 64, 6, 5), torch.float32)
    else:
        check_capture(torch, nst.LSTM(64, 64, **how), (4, 3, 64), torch.float32)


def test_torch_captures_arrays_of_ours():
    torch, _ = torch_layers()
    w, x = weight().to("cuda"), ns.to_device(drawn(64, N))
    out = device.empty((64, N), "float32")
    ns.matmul(x, w, out=out)
    graph = torch.cuda.CUDAGraph()
    with captured_by(torch, graph), ns.stream(torch.cuda.current_stream()):
        ns.matmul(x, w, out=out)
        with pytest.raises(RuntimeError, match="cannot be part of a captured step"):
            ns.synchronize()
    for seed in (3, 4):
        device.refill(x, drawn(64, N, seed=seed))
        device.refill(out, np.full((64, N), np.nan, np.float32))
        graph.replay()
        got = out.numpy()
        np.testing.assert_array_equal(got, ns.matmul(x, w).numpy())


def test_torch_makes_callables_with_graphs():
    """Whose backward is captured while the stream of the warm-up joins in."""
    torch, nst = torch_layers()
    layer = linear(nst, torch.float32, ns.patterns.random(8, 8, 0.3, seed=8))
    plain, x = copy.deepcopy(layer), torch.randn(64, N, device="cuda", requires_grad=True)
    gc.collect()
    layer = torch.cuda.make_graphed_callables(layer, (x,))
    for _ in range(2):
        inputs = torch.randn(64, N, device="cuda", requires_grad=True)
        results = []
        for each in (layer, plain):
            y = each(inputs)
            parts = torch.autograd.grad(y.square().sum(), [inputs, *each.parameters()])
            results.append([part.clone() for part in (y, *parts)])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-3)


FREED = """
import gc, numpy as np, numbsparse as ns, torch
from numbsparse import device
large = [ns.to_device(np.ones(2**20, np.float32)) for _ in range(4)]  # 4 MiB each
used = large[0]
step = ns.graph(lambda x: ns.nn.functional.relu(x))
step(large[1])
with ns.stream(torch.cuda.Stream()):
    device.copy_of(used)  # another stream uses it too
x = torch.ones(1000, device="cuda")
pool = device.runtime.current_device().memory_resource.attributes
ns.synchronize()
torch.cuda.synchronize()
before = pool.used_mem_current
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = x + 1
    del large, used, step
    gc.collect()
    y += 1
graph.replay()
torch.cuda.synchronize()
ns.synchronize()
assert (y == 3).all()
freed = before - pool.used_mem_current
assert freed >= 4 * 2**22, (before, freed)
"""


def test_what_is_freed_while_torch_captures_is_free():
    torch_layers()
    run = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    assert "failed" not in run.stdout + run.stderr, run.stderr


def test_two_graphs_of_torch_run_side_by_side():
    torch, nst = torch_layers()
    layer = linear(nst, torch.float32).requires_grad_(False)
    inputs = [torch.randn(32, N, device="cuda") for _ in range(2)]
    expected = [layer(x) for x in inputs]
    graphs, results = [torch.cuda.CUDAGraph() for _ in inputs], []
    for graph, x in zip(graphs, inputs, strict=True):
        with torch.cuda.graph(graph):
            results.append([layer(x) for _ in range(20)])
    pair = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(3):
        for graph, stream in zip(graphs, pair, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for several, right in zip(results, expected, strict=True):
        for y in several:
            torch.testing.assert_close(y, right, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # as torch imports itself
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # the one it begins with
def test_compile_with_reduced_overhead_captures_it():
    torch, nst = torch_layers()
    pytest.importorskip("triton")
    from torch._dynamo.utils import counters

    model = torch.nn.Sequential(
        linear(nst, torch.float32), torch.nn.GELU(), linear(nst, torch.float32)
    )
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    counters.clear()
    for seed in range(4):  # the first ones warm up and capture
        x = torch.randn(64, N, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
        found = []
        for run in (model, compiled):
            torch.compiler.cudagraph_mark_step_begin()
            for parameter in model.parameters():
                parameter.grad = None
            y = run(x)
            y.square().sum().backward()
            found.append([y.detach().clone(), *(p.grad.clone() for p in model.parameters())])
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-3)
    assert counters["inductor"]["cudagraph_skips"] == 0, dict(counters["inductor"])
