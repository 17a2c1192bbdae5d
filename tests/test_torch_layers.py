"""Layers of numbsparse.torch against torch's own, dense ones: values and gradients."""

import pickle
from functools import partial

import numpy as np
import pytest
from conftest import needs_bfloat16
from torch_helpers import (
    dense_conv,
    dense_linear,
    dense_lstm,
    drawn,
    grads,
    layout,
    ns,
    nst,
    torch,
)

from numbsparse.torch import operators

flop_counter = pytest.importorskip("torch.utils.flop_counter")
nn = torch.nn
DOUBLE = {"dtype": torch.float64, "block_size": 4}
CONVS = {1: nst.Conv1d, 2: nst.Conv2d, 3: nst.Conv3d}


def linear(seed=0, **options):
    return nst.Linear(10, 13, layout=layout(3, 4, seed=seed), **(DOUBLE | options))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kept", [None, layout(3, 4)], ids=["all", "some"])
def test_linear(kept, bias):
    layer, x = nst.Linear(10, 13, bias, layout=kept, **DOUBLE), drawn(2, 3, 10)
    y, expected = layer(x), nn.functional.linear(x, *dense_linear(layer))
    torch.testing.assert_close(y, expected)
    inputs = [x, *layer.parameters()]
    torch.testing.assert_close(grads(y, inputs), grads(expected, inputs))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("stride", "padding", "dilation"), [(1, 0, 1), (2, 1, 1), (1, "same", 2)])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_conv(axes, stride, padding, dilation, bias):
    options = {"layout": layout(3, 4), **DOUBLE}
    conv = CONVS[axes](10, 13, 3, stride, padding, dilation, bias=bias, **options)
    x = drawn(2, 10, *(5, 6, 7)[:axes])
    torchs = getattr(nn.functional, f"conv{axes}d")
    y, expected = conv(x), torchs(x, dense_conv(conv), conv.bias, stride, padding, dilation)
    torch.testing.assert_close(y, expected)
    inputs = [x, *conv.parameters()]
    first = grads(y, inputs, create_graph=True)
    of_dense = grads(expected, inputs, create_graph=True)
    torch.testing.assert_close(first, of_dense)
    torch.testing.assert_close(grads(first, inputs), grads(of_dense, inputs))
    torch.testing.assert_close(conv(x[0]), y[0])  # without a batch, as torch


def test_conv_of_channels_last_copies_nothing_and_gives_such():
    conv = nst.Conv2d(8, 8, 3, block_size=4)
    x = torch.ones(2, 8, 5, 5).to(memory_format=torch.channels_last)
    assert conv(x).is_contiguous(memory_format=torch.channels_last)
    assert x.movedim(1, -1).is_contiguous()


def test_masked_taps():
    causal = ns.patterns.causal((3, 3))
    conv = nst.Conv2d(8, 8, 3, padding=1, taps=causal, layout=layout(2, 2), **DOUBLE)
    kept = torch.from_numpy(causal)
    assert (dense_conv(conv)[..., ~kept] == 0).all()
    assert (dense_conv(conv)[..., kept] != 0).any()


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # torch.library.opcheck itself
def test_operators_of_convolutions_are_what_torch_asks_of_them():
    conv = nst.Conv1d(10, 13, 3, layout=layout(3, 4), **DOUBLE)
    window = [n for three in ns.ops.conv_window((5,), 3, 2, 1, 1) for n in three]
    ops, x, y = torch.ops.numbsparse, drawn(2, 5, 10), drawn(2, 3, 13)
    how = (conv.handles["weight"].word, 10, 13, 4, window, "highest")
    for op, arguments in (
        (ops.conv, (x, conv.weight, *how)),
        (ops.conv_transpose, (y, conv.weight, *how)),
        (ops.conv_weight_grad, (x, y, *how)),
    ):
        torch.library.opcheck(op.default, arguments)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_lstm(layers, batch_first):
    how = {"input_layout": layout(3, 4), "layout": layout(4, 4), **DOUBLE}
    lstm = nst.LSTM(10, 14, layers, batch_first=batch_first, **how)
    theirs = nn.LSTM(10, 14, layers, batch_first=batch_first, dtype=torch.float64)
    x, h, c = drawn(5, 3, 10), drawn(layers, 3, 14), drawn(layers, 3, 14, seed=1)
    dense = dense_lstm(lstm)
    y, state = lstm(x, (h, c) if not batch_first else None) if not batch_first else lstm(x)
    expected = (x, (h, c)) if not batch_first else (x,)
    their_y, their_state = torch.func.functional_call(theirs, dense, expected)
    results, their_results = (y, *state), (their_y, *their_state)
    torch.testing.assert_close(results, their_results)
    inputs = [x, *([] if batch_first else [h, c]), *lstm.parameters()]
    for some in (slice(None), slice(0, 1), slice(2, 3)):  # all results, some, the last c alone
        torch.testing.assert_close(
            torch.autograd.grad(sum(a.square().sum() for a in results[some]), inputs,
                                retain_graph=True, allow_unused=True, materialize_grads=True),
            torch.autograd.grad(sum(a.square().sum() for a in their_results[some]), inputs,
                                retain_graph=True, allow_unused=True, materialize_grads=True),
        )  # fmt: skip


def test_what_units_of_an_lstm_beyond_the_last_hold_reaches_no_gradient():
    lstm, found = nst.LSTM(10, 13, 2, **DOUBLE), []
    x, h, c = drawn(5, 3, 10), drawn(2, 3, 13), drawn(2, 3, 13, seed=1)
    for beyond in (0, torch.nan):
        for name, p in lstm.named_parameters():
            if p.dim() == 1:
                p.detach().view(-1, 4, 4)[-1, :, 1:] = beyond
            else:
                last = lstm.handles[name].layout.index.block_columns // 4 == 3
                p.detach()[torch.from_numpy(last), :, 1:] = beyond
        inputs = [x, h, c, *lstm.parameters()]
        found.append(grads(lstm(x, (h, c))[0], inputs))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("shapes", [[(2, 3, 14)], [(3, 3, 14), (2, 3, 14)], [(2, 3, 12)] * 2])
def test_an_lstm_refuses_a_state_of_another_shape(shapes):
    lstm, state = nst.LSTM(10, 14, 2, layout=layout(4, 4), **DOUBLE), [drawn(*s) for s in shapes]
    with pytest.raises(ValueError, match=r"state takes h and c of the shape \(2, 3, 14\), got \["):
        lstm(drawn(5, 3, 10), tuple(state))


def test_the_recurrent_gradient_is_ready_before_that_of_the_inputs_is_computed(monkeypatch):
    """Of each layer, the last one first: so DDP sums one while the other is computed."""
    lstm, order = nst.LSTM(10, 14, 2, layout=layout(4, 4), **DOUBLE), []
    sddmm, names = operators.sddmm, {p: name for name, p in lstm.named_parameters()}

    def computed(x, *others):
        order.append(f"computes {x[0].shape[-1]}")
        return sddmm(x, *others)

    monkeypatch.setattr(operators, "sddmm", computed)
    for p in lstm.parameters():
        p.register_post_accumulate_grad_hook(lambda p: order.append(names[p]))
    y, _ = lstm(torch.randn(3, 2, 10, dtype=torch.float64))
    y.sum().backward()
    assert [what for what in order if "bias" not in what] == [
        *("computes 14", "weight_hh_l1", "computes 14", "weight_ih_l1"),
        *("computes 14", "weight_hh_l0", "computes 10", "weight_ih_l0"),
    ]


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_no_anomaly_is_found_in_memory_that_nobody_reads():
    lstm = nst.LSTM(10, 14, layout=layout(4, 4), **DOUBLE)
    torch.use_deterministic_algorithms(True)  # fills what is empty with NaN
    try:
        with torch.autograd.detect_anomaly():
            lstm(drawn(3, 2, 10))[0].sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)


def test_gradients_of_an_lstm_that_is_computed_again_or_kept_elsewhere():
    lstm, x = nst.LSTM(10, 14, layout=layout(4, 4), **DOUBLE), drawn(3, 2, 10)
    x.requires_grad_()
    usual = grads(lstm(x)[0], lstm.parameters())
    again = torch.utils.checkpoint.checkpoint(lambda x: lstm(x)[0], x, use_reentrant=False)
    torch.testing.assert_close(grads(again, lstm.parameters()), usual)
    with torch.autograd.graph.save_on_cpu():
        kept = lstm(x)[0]
    torch.testing.assert_close(grads(kept, lstm.parameters()), usual)


@pytest.mark.parametrize("frozen", ["", "weight_hh bias", "weight_hh bias weight_ih", "weight_ih"])
def test_no_part_of_a_second_derivative_of_an_lstm_is_taken_for_all_of_it(frozen):
    lstm, x = nst.LSTM(10, 14, layout=layout(4, 4), **DOUBLE), drawn(3, 2, 10)
    for name, p in lstm.named_parameters():
        p.requires_grad_(name.removesuffix("_l0") not in frozen.split())
    for inputs in (x, lstm.parameters()):
        watched = [p for p in ([inputs] if inputs is x else inputs) if p.requires_grad]
        if not watched:
            continue
        first = torch.autograd.grad(lstm(x)[0].sum(), watched, create_graph=True)
        with pytest.raises(RuntimeError, match="of an LSTM is not differentiable again"):
            sum((g**2).sum() for g in first).backward()


def test_hooks_of_a_convolution_run_once_for_an_image_alone():
    conv, images, calls = nst.Conv2d(8, 8, 3, block_size=4), torch.ones(2, 8, 5, 5), []
    conv.register_forward_pre_hook(lambda module, of: (2 * of[0],))
    conv.register_forward_hook(lambda module, of, y: calls.append(y.shape))
    torch.testing.assert_close(conv(images[0]), conv(images)[0])
    assert calls == [(8, 3, 3), (2, 8, 3, 3)]


@pytest.mark.parametrize(
    ("ours", "dense", "shape"),
    [
        (nst.Linear(8, 16, block_size=4), torch.nn.Linear(8, 16), (2, 3, 8)),
        (nst.Conv2d(8, 16, 3, 2, 1, block_size=4), torch.nn.Conv2d(8, 16, 3, 2, 1), (2, 8, 6, 7)),
    ],
    ids=["Linear", "Conv2d"],
)
def test_operations_are_counted_as_those_of_dense_layers(ours, dense, shape):
    def counted(layer, x):
        with flop_counter.FlopCounterMode(display=False) as counter:
            layer(x).sum().backward()
        return counter.get_total_flops()

    x = drawn(*shape, dtype=torch.float32)
    assert counted(ours, x) == counted(dense, x) > 0


def test_operations_of_an_lstm_are_counted():
    lstm, x = nst.LSTM(8, 16, block_size=4), drawn(5, 3, 8, dtype=torch.float32)
    with flop_counter.FlopCounterMode(display=False) as counter:
        lstm(x)[0].sum().backward()
    numbers = lstm.weight_ih_l0.numel() + lstm.weight_hh_l0.numel()
    assert counter.get_total_flops() == 3 * 2 * 5 * 3 * numbers


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # torch.library.opcheck itself
def test_the_operator_of_lstm_is_what_torch_asks_of_it():
    lstm = nst.LSTM(10, 14, layout=layout(4, 4), **DOUBLE)
    words = [handle.word for handle in lstm.handles.values()]
    given = drawn(3, 2, 10), *lstm.parameters(), drawn(2, 14), drawn(2, 14), *words, "highest"
    torch.library.opcheck(torch.ops.numbsparse.lstm.default, given)
    y, _ = lstm(given[0])
    (first,) = grads(y, [lstm.weight_hh_l0], create_graph=True)
    with pytest.raises(RuntimeError, match="the gradient of an LSTM is not differentiable again"):
        first.sum().backward()


@needs_bfloat16
@pytest.mark.parametrize(
    ("layer", "shape", "half"),
    [
        (nst.Linear(8, 8, block_size=4), (2, 8), True),
        (nst.Conv1d(8, 8, 3, block_size=4), (2, 8, 5), True),
        (nst.LSTM(8, 8, block_size=4), (3, 2, 8), False),
    ],
    ids=["Linear", "Conv1d", "LSTM"],
)
def test_autocast_on_the_cpu(layer, shape, half):
    x = drawn(*shape, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    y = y if half else y[0]
    assert y.dtype == (torch.bfloat16 if half else torch.float32)
    y.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


class OfAllLayers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nst.Conv2d(8, 8, 3, padding=1, block_size=4)
        self.lstm = nst.LSTM(8, 16, block_size=8)
        self.out = nst.Linear(16, 8, layout=[[1], [1]], block_size=8)

    def forward(self, x):
        y, (h, _) = self.lstm(self.conv(x).flatten(2).permute(2, 0, 1))
        return self.out(y) + h[..., :8]


def test_a_graph_of_torch_fx_has_a_node_for_each_layer():
    model, x = OfAllLayers(), torch.randn(2, 8, 3, 4)
    y, graph = model(x), torch.fx.symbolic_trace(model)
    del model  # the graph's layers keep their layouts
    assert [n.target for n in graph.graph.nodes if n.op == "call_module"] == ["conv", "lstm", "out"]
    for traced in (graph, pickle.loads(pickle.dumps(graph))):
        torch.testing.assert_close(traced(x), y)
    with pytest.raises(TypeError, match="takes this layer within a model, got the layer alone"):
        torch.fx.symbolic_trace(nst.Linear(8, 8))


def test_first_values_count_only_kept_blocks():
    torch.manual_seed(0)
    pattern = np.zeros((8, 2), bool)
    pattern[:2, 0] = pattern[:, 1] = True
    layer = nst.Linear(8 * 32 - 8, 64, layout=pattern)  # the last block has 24 rows
    for column, fan_in in ((0, 64), (1, 248)):
        blocks = layer.weight[torch.from_numpy(layer.layout.indices == column)]
        bound = fan_in**-0.5
        assert 0.99 * bound < blocks.abs().max() <= bound
        biases = layer.bias[32 * column :][:32].abs()
        assert 0.7 * bound < biases.max() <= bound


def test_layers_are_drawn_where_they_are_said_to_be():
    with torch.device("meta"):
        for make in (nst.Linear, nst.LSTM, partial(nst.Conv1d, kernel_size=3)):
            layer = make(8, 8, block_size=4, device="cpu")
            assert all(p.isfinite().all() for p in layer.parameters())


def test_an_lstm_forgets_nothing_at_first():
    layer = nst.LSTM(8, 12, 2, block_size=4)
    layer.bias_l1.data.fill_(7)
    layer.reset_parameters()
    for bias in (layer.bias_l0, layer.bias_l1):
        of_gates = bias.detach().reshape(3, 4, 4).transpose(0, 1).reshape(4, 12)
        assert of_gates.tolist() == [[0] * 12, [1] * 12, [0] * 12, [0] * 12]  # i, f, g, o


STEPS = torch.ones(2, 3, 8)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: nst.Linear(8, 8, layout=[[1, 0]]), ValueError, "layout takes 1 x 1 blocks"),
        (lambda: nst.Linear(8, 8, block_size=5), ValueError, "block_size takes one of"),
        (lambda: linear()(drawn(2, 9)), ValueError, r"x takes the shape \(\.\.\., 10\)"),
        (lambda: nst.Conv2d(8, 8, 3, groups=2), ValueError, "block_diagonal"),
        (lambda: nst.Conv2d(8, 8, 3, padding_mode="circular"), ValueError, 'takes "zeros"'),
        (lambda: nst.Conv2d(8, 8, 3)(torch.ones(1, 4, 4, 8)), ValueError, r"\(batch, 8, \*space\)"),
        (lambda: nst.LSTM(8, 8, bidirectional=True), ValueError, "bidirectional takes only False"),
        (lambda: nst.LSTM(8, 8, 2, layout=[None]), ValueError, "layout takes one for each of 2"),
        (lambda: nst.LSTM(8, 8)(torch.ones(2, 8)), ValueError, r"shape \(time, batch, 8\)"),
        (
            lambda: nst.LSTM(8, 8, batch_first=True)(torch.ones(2, 8)),
            ValueError,
            r"shape \(batch, time, 8\)",
        ),
        (lambda: nst.Linear(0, 8), ValueError, "in_features takes .* got 0"),
        (lambda: nst.Linear(8, 8.0), TypeError, "out_features takes .* got 8.0"),
        (lambda: nst.Conv1d(0, 8, 3), ValueError, "in_channels takes .* got 0"),
        (lambda: nst.Conv2d(8, None, 3), TypeError, "out_channels takes .* got None"),
        (lambda: nst.LSTM(8, 8, input_layout=[[1, 0]]), ValueError, "input_layout takes 1 x 1"),
        (lambda: nst.LSTM(8, 8, layout=[[1, 0]]), ValueError, "^layout takes 1 x 1"),
        (lambda: nst.Conv1d(8, 8, 3, taps=[1, 0]), ValueError, "taps takes booleans"),
        (lambda: nst.Conv1d(8, 8, 3)(np.ones(3)), TypeError, r"x takes .* got numpy\.ndarray"),
        (lambda: nst.LSTM(8, 8)(None), TypeError, "x takes .* got NoneType"),
        (lambda: nst.LSTM(8, 8)(STEPS, STEPS), TypeError, "state takes .* got torch.Tensor"),
        (lambda: nst.LSTM(8, 8)(STEPS, (STEPS, 3)), TypeError, "c takes .* got int"),
        (lambda: nst.LSTM(0, 8), ValueError, "input_size takes .* got 0"),
        (lambda: nst.LSTM(8, True), TypeError, "hidden_size takes .* got True"),
        *(
            (partial(new, 8, 8, *more, dtype=torch.complex64), TypeError, "^dtype takes .*64")
            for new, *more in ((nst.Linear,), (nst.Conv1d, 3), (nst.LSTM,))
        ),
    ],
)
def test_refusals(call, error, says):
    with pytest.raises(error, match=says):
        call()
