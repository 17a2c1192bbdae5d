"""Models of torch with sparse layers: copied, saved and loaded, made of dense ones in one call."""

import copy
import pickle

import numpy as np
import pytest
from torch_helpers import (
    dense_linear,
    drawn,
    layout,
    ns,
    nst,
    torch,
)

nn = torch.nn
prune = pytest.importorskip("torch.nn.utils.prune")
DOUBLE = {"dtype": torch.float64, "block_size": 4}


def linear(seed=0, **options):
    return nst.Linear(10, 13, layout=layout(3, 4, seed=seed), **(DOUBLE | options))


def test_from_linear():
    dense = nn.Linear(10, 13, dtype=torch.float64).eval()
    dense.bias.requires_grad_(False)
    for how in ({"pattern": layout(3, 4)}, {"density": 0.4}):
        layer = nst.Linear.from_linear(dense, **how, block_size=4)
        assert layer.layout.n_blocks == 5
        weight, bias = dense_linear(layer)
        kept = nst.BlockSparse(torch.ones_like(layer.weight), layer.layout, shape=(10, 13))
        torch.testing.assert_close(weight, dense.weight * kept.to_dense().T, rtol=0, atol=0)
        torch.testing.assert_close(bias, dense.bias, rtol=0, atol=0)
        assert not layer.training
        assert not layer.bias.requires_grad
        assert layer.weight.requires_grad
    largest = ns.patterns.from_dense(dense.weight.detach().numpy().T, 4, density=0.4)
    assert layer.layout == ns.Layout(largest)
    assert (
        nst.Linear.from_linear(nn.Linear(8, 8, bias=False), density=0.5, block_size=4).bias is None
    )


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(copied):
    layer, x = linear(seed=3), drawn(2, 10)
    expected = layer(x)
    other = copied(layer)
    del layer
    torch.testing.assert_close(other(x), expected, rtol=0, atol=0)
    assert other.layout == layout(3, 4, seed=3)


def saved(model, tmp_path):
    torch.save(model.state_dict(), tmp_path / "model.pt")
    return torch.load(tmp_path / "model.pt", weights_only=True)


MODELS = {
    "Linear": lambda seed: linear(seed),
    "Conv1d": lambda seed: nst.Conv1d(10, 13, 3, layout=layout(3, 4, seed=seed), **DOUBLE),
    "LSTM": lambda seed: nst.LSTM(16, 16, 2, layout=layout(4, 4, seed=seed), **DOUBLE),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_state_dict_holds_the_layout(name, tmp_path):
    def model(seed):
        return nn.ModuleDict({"inner": MODELS[name](seed)})

    one, same, other = model(1), model(1), model(2)
    state = saved(one, tmp_path)
    same.load_state_dict(state)
    optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(RuntimeError, match=r"_pattern is of another layout than inner\.weight"):
        other.load_state_dict(state)
    for key, value in other.state_dict().items():
        assert torch.equal(value, before[key])  # nothing was loaded
    nst.adopt_layouts_(other, state)
    other.load_state_dict(state)
    for model in (same, other):
        for key, value in model.state_dict().items():
            assert torch.equal(value, state[key])
    for inner in (one.inner, other.inner):
        for handle, theirs in zip(inner.handles.values(), one.inner.handles.values(), strict=True):
            assert handle.layout == theirs.layout
    for parameter in other.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # has the same parameters
    for parameter, old in zip(other.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(parameter, old - 1)


def test_safetensors_keep_the_layout(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    one, other = linear(1), linear(2)
    safetensors.save_model(one, str(tmp_path / "model.safetensors"))
    state = safetensors.load_file(tmp_path / "model.safetensors")
    nst.adopt_layouts_(other, state)
    other.load_state_dict(state)
    torch.testing.assert_close(other.state_dict(), one.state_dict(), rtol=0, atol=0)


def test_a_state_dict_without_a_layout():
    layer = linear()
    state = {k: v for k, v in layer.state_dict().items() if k != "weight_pattern"}
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "weight_pattern"'):
        layer.load_state_dict(state)
    layer.load_state_dict(state, strict=False)
    with pytest.raises(ValueError, match=r"weight_pattern takes \(3, 4\) blocks, got \(2, 2\)"):
        nst.adopt_layouts_(layer, {"weight_pattern": torch.ones(2, 2, dtype=torch.bool)})


def test_a_state_dict_that_was_made_bfloat16_as_a_whole():
    layer, other = linear(), linear(seed=1)
    state = {name: of.bfloat16() for name, of in layer.state_dict().items()}
    nst.adopt_layouts_(other, state)
    other.load_state_dict(state)
    assert other.layout == layer.layout
    torch.testing.assert_close(other.weight, layer.weight.bfloat16().double(), rtol=0, atol=0)


@pytest.mark.parametrize(
    "compute",
    [lambda layer: prune.identity(layer, "weight"), torch.nn.utils.parametrizations.weight_norm],
    ids=["prune", "weight_norm"],
)
def test_what_is_computed_takes_no_other_layout(compute):
    """Half of it would be taken over: the layout, and not what the weight is computed of."""
    layers = nn.Sequential(linear(), linear())
    compute(layers[1])
    before = [layer.layout for layer in layers]
    patterns = {f"{i}.weight_pattern": torch.ones(3, 4, dtype=torch.bool) for i in (0, 1)}
    with pytest.raises(ValueError, match=r"1\.weight_pattern takes the layout that 1 has as long"):
        nst.adopt_layouts_(layers, patterns)
    assert [layer.layout for layer in layers] == before
    nst.adopt_layouts_(layers, layers.state_dict())


def mlp():
    torch.manual_seed(0)
    tied = nn.Linear(32, 32)
    return nn.ModuleDict(
        {
            "mlp": nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)),
            "twice": nn.ModuleList([tied, tied]),
            "embedding": nn.Embedding(8, 32),
            "head": nn.Linear(32, 8, bias=False),
        }
    )


def test_sparsify():
    model, dense = mlp(), mlp()
    nst.sparsify_(model, lambda module, name: name.startswith(("mlp", "twice")), 0.25, block_size=8)
    kinds = {name: type(module) for name, module in model.named_modules() if "." in name}
    assert kinds == {"mlp.0": nst.Linear, "mlp.1": nn.GELU, "mlp.2": nst.Linear,
                     "twice.0": nst.Linear}  # fmt: skip
    assert model["twice"][0] is model["twice"][1]
    assert type(model["head"]) is nn.Linear
    assert model["mlp"][0].layout.density == 0.25
    expected = nst.Linear.from_linear(dense["mlp"][2], density=0.25, block_size=8)
    torch.testing.assert_close(model["mlp"][2].state_dict(), expected.state_dict())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_encoders_call_layers_that_sparsify_made():
    """torch's own would compute with their weights, as they are, where nothing is recorded."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    dense = nn.Sequential(nn.TransformerEncoder(layer, 2)).eval()
    model = copy.deepcopy(dense)
    nst.sparsify_(model, density=1.0, block_size=8)
    x, mask = torch.randn(2, 5, 16), torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 3:] = True
    with torch.no_grad():
        torch.testing.assert_close(model(x), dense(x), rtol=1e-4, atol=1e-4)
        with_mask = [m[0](x, src_key_padding_mask=mask)[:, :3] for m in (model, dense)]
        torch.testing.assert_close(*with_mask, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_also_where_others_came_before():
    layer = nst.Linear(8, 8, block_size=8)
    layer(torch.ones(2, 3, 8))
    rows = [torch.ones(n, 8) for n in (2, 3)]
    for kind in (torch.strided, torch.jagged):
        with pytest.raises(TypeError, match="x takes a dense tensor, got a nested one: see torch"):
            layer(torch.nested.nested_tensor(rows, layout=kind))


def test_hooks_go_with_the_layer_that_replaces_theirs():
    model, seen = nn.Sequential(nn.Linear(8, 8)), []
    handle = model[0].register_forward_hook(lambda *of: seen.append(1) or 2 * of[-1])
    model[0].register_forward_pre_hook(lambda *of, **how: seen.append(0), with_kwargs=False)
    model[0].register_full_backward_hook(lambda *of: seen.append(2))
    nst.sparsify_(model, density=1.0, block_size=8)
    x = torch.ones(1, 8, requires_grad=True)
    doubled = model(x)
    doubled.sum().backward()
    handle.remove()
    torch.testing.assert_close(doubled, 2 * model(x))
    assert seen == [0, 1, 2, 0]


def test_sparsify_by_a_pattern_for_each_layer():
    model = mlp()
    nst.sparsify_(
        model["mlp"], pattern=lambda i, o: ns.patterns.banded(i, o, width=1), block_size=8
    )
    assert model["mlp"][0].layout == ns.Layout(ns.patterns.banded(4, 8, width=1))
    assert model["mlp"][2].layout == ns.Layout(ns.patterns.banded(8, 4, width=1))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize(
    "compute",
    [
        torch.nn.utils.weight_norm,
        lambda layer: prune.l1_unstructured(layer, "bias", 0.5),
    ],
    ids=["weight_norm", "prune"],
)
def test_what_a_hook_computes_is_not_replaced(compute):
    """The hook would look for parameters that the new layer has not."""
    model = mlp()
    compute(model["mlp"][2])
    before = dict(model.named_modules())
    with pytest.raises(ValueError, match="2 has a weight or bias that a hook computes"):
        nst.sparsify_(model["mlp"], density=0.5, block_size=8)
    assert dict(model.named_modules()) == before


@pytest.mark.parametrize("other", ["embedding", "mlp.0"])  # which stays, and which goes too
def test_a_weight_that_is_used_elsewhere_is_not_replaced(other):
    model = mlp()
    model["head"].weight = model.get_submodule(other).weight
    before = dict(model.named_modules())
    with pytest.raises(ValueError, match=f"head shares its weight with {other}"):
        nst.sparsify_(model, density=0.5, block_size=8)
    assert dict(model.named_modules()) == before


def of_complex():
    return nn.Sequential(nn.Linear(8, 8, dtype=torch.complex64))


def with_pattern(pattern):
    nst.adopt_layouts_(linear(), {"weight_pattern": pattern})


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: nst.sparsify_(mlp(), lambda m, name: False, 0.5), ValueError, "got none"),
        (lambda: nst.sparsify_(nn.Linear(8, 8), density=0.5), ValueError, "model takes a module"),
        (lambda: nst.sparsify_(mlp()), ValueError, "exactly one of pattern and density"),
        (
            lambda: nst.sparsify_(mlp(), density=0.25),
            ValueError,
            "least one of the 2 blocks of Lin",
        ),
        (
            lambda: nst.sparsify_(mlp().to("meta"), density=1.0),
            ValueError,
            "values, got one on meta",
        ),
        (lambda: nst.Linear.from_linear(nn.ReLU(), density=1), TypeError, "linear takes a torch.n"),
        (lambda: nst.sparsify_({}, density=0.5), TypeError, "model takes .* got dict"),
        (lambda: nst.adopt_layouts_(None, {}), TypeError, "model takes .* got NoneType"),
        (lambda: nst.adopt_layouts_(linear(), []), TypeError, "state_dict takes .* got list"),
        (
            lambda: nst.sparsify_(of_complex(), density=1.0),
            TypeError,
            "^0: linear takes",
        ),
        (lambda: with_pattern("x"), TypeError, "^weight_pattern takes a pattern, got str"),
        (lambda: with_pattern(torch.ones(3)), ValueError, "^weight_pattern takes a 2-D array"),
        (
            lambda: linear().load_state_dict({"weight_pattern": 3}),
            TypeError,
            "^weight_pat",
        ),
    ],
)
def test_refusals(call, error, says):
    with pytest.raises(error, match=says):
        call()


def test_a_huge_layout_needs_no_dense_pattern():
    """Made, copied, run: with 2^20 blocks on a side that would be a terabyte."""
    n = 2**20
    diagonal = ns.Layout.from_arrays(np.arange(n + 1), np.arange(n), (n, n))
    made = nst.Linear(4 * n, 4 * n, bias=False, layout=diagonal, block_size=4)
    layer = copy.deepcopy(made)
    torch.testing.assert_close(layer(torch.ones(1, 4 * n))[0], layer.weight.sum(1).reshape(-1))


def test_a_pattern_is_found_by_the_name_that_a_state_dict_has():
    """As torch.distributed looks for it."""
    layer = nst.Linear(
        16, 32, layout=ns.Layout(ns.patterns.random(4, 8, 0.4, seed=0)), block_size=4
    )
    torch.testing.assert_close(layer.weight_pattern, layer.state_dict()["weight_pattern"])
    with pytest.raises(AttributeError, match="other_pattern"):
        _ = layer.other_pattern
