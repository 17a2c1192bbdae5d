"""Pruning at once and step by step: what is kept, what follows, what is refused."""

import numpy as np
import pytest
from conftest import host
from drawn import draws
from hypothesis import given
from hypothesis import strategies as st

import numbsparse as ns
from numbsparse import device, nn
from numbsparse.nn import functional as F
from numbsparse.nn import optim
from numbsparse.nn.utils import GradualPruning, compact, prune, weight_norm


def model_of(sizes=(20, 24, 10), seed=0, **how):
    """Layers whose features end within a block; the second has the larger weights."""
    first = nn.Linear(*sizes[:2], block_size=4, seed=seed, **how)
    second = nn.Linear(*sizes[1:], block_size=4, seed=seed + 1, **how)
    second.weight.data = 1.5 * second.weight.data
    return nn.Sequential(first, nn.ReLU(), second)


def weights_of(model):
    return {name: p for name, p in model.named_parameters() if isinstance(p.data, ns.BlockSparse)}


def train(model, optimizer, steps, after=()):
    for step in steps:
        x = np.random.default_rng(step).standard_normal((6, 20), dtype=np.float32)
        loss = F.mean(model(x) * model(x))
        model.zero_grad()
        loss.backward()
        optimizer.step()
        for one in after:
            one.step()


def step(model, optimizer, average):
    """With the parameters as their gradients: quick in the simulator too."""
    for p in model.parameters():
        p.grad = ns.Tensor(p.data)
    optimizer.step()
    average.step()


@pytest.mark.parametrize("turned", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("how", [{"density": 0.3}, {"threshold": 0.5}, {"density": 1.0}], ids=str)
def test_a_dense_layer_keeps_what_from_dense_keeps(place, how, turned):
    layer = nn.Linear(20, 24, block_size=4, seed=0).to(place)
    if turned:
        layer.weight.data = layer.weight.data.T.remap(np.ones((6, 5))).T
    dense = host(layer.weight.data)
    right = ns.BlockSparse.from_dense(dense, ns.patterns.from_dense(dense, 4, **how), block_size=4)
    assert prune(layer, **how) == {"weight": right.density}
    assert layer.weight.data.layout == right.layout
    assert layer.weight.place == place
    np.testing.assert_array_equal(host(layer.weight.data), right.toarray())


@pytest.mark.parametrize("by", ["l1", "l2", "max"])
def test_layers_compete_for_the_density_of_a_model(by):
    model, threshold = model_of(), model_of()
    weights = weights_of(model)
    norms = np.concatenate([p.data.block_norms(by) for p in weights.values()])
    n = round(0.4 * norms.size)
    least = np.sort(norms)[::-1][n - 1]
    densities = prune(model, 0.4, by=by, scope="model")
    prune(threshold, threshold=least, by=by)
    assert sum(p.data.n_blocks for p in weights.values()) == n
    assert densities["2.weight"] > densities["0.weight"] > 0
    for name, p in weights_of(threshold).items():
        assert p.data.layout == weights[name].data.layout


def test_all_that_belongs_to_a_layout_follows(place):
    model = model_of().to(place)
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    average = optim.ExponentialMovingAverage(model.parameters(), 0.5)
    step(model, optimizer, average)
    states = [one.state_dict() for one in (optimizer, average)]
    before = {name: (host(p.data), host(p.grad.data)) for name, p in weights_of(model).items()}
    generation = device.generation()
    prune(model, 0.5, remap=[optimizer, average])
    assert device.generation() > generation  # captured steps are stale
    kept = {}
    for i, (name, p) in enumerate(model.named_parameters()):
        if name in before:
            ones = np.ones(p.shape)
            kept[str(i)] = ns.BlockSparse.from_dense(ones, p.data.layout, block_size=4).toarray()
            assert p.data.layout == p.grad.data.layout
            for now, then in zip((p.data, p.grad.data), before[name], strict=True):
                np.testing.assert_array_equal(host(now), then * kept[str(i)])
    for old, one in zip(states, (optimizer, average), strict=True):
        for key, value in one.state_dict().items():
            if isinstance(value, ns.BlockSparse):
                mask = kept[key.partition(".")[0]]
                np.testing.assert_array_equal(host(value), host(old[key]) * mask, err_msg=key)
    optimizer.step()  # with the gradients that are left
    step(model, optimizer, average)


def test_a_pruned_layer_is_one_made_so(rng):
    layer = nn.Linear(256, 256, seed=0)
    prune(layer, 0.1)
    made = nn.Linear(256, 256, layout=layer.weight.data.layout.pattern, seed=0)
    made.load_state_dict(layer.state_dict())
    one, two = (a.weight.data for a in (layer, made))
    assert type(one.layout) is type(two.layout) is ns.Layout
    assert one.values.flags.c_contiguous
    for walk in ("rows", "columns"):
        walks = getattr(one.layout.index, walk), getattr(two.layout.index, walk)
        for mine, theirs in zip(*walks, strict=True):
            np.testing.assert_array_equal(mine, theirs)
            assert (mine.dtype, mine.flags.c_contiguous) == (theirs.dtype, True)
    x = rng.standard_normal((8, 256), dtype=np.float32)
    np.testing.assert_array_equal(layer(x).numpy(), made(x).numpy())


def test_a_shared_weight_is_pruned_once():
    first = nn.Linear(16, 16, block_size=4, seed=0)
    model = nn.Sequential(first, nn.ReLU(), first)
    assert prune(model, 0.5) == {"0.weight": 0.5}
    assert prune([first.weight, first.bias, first.weight], 0.25) == {"model[0]": 0.25}
    other = nn.Linear(16, 16, block_size=4)
    own = first.weight.data
    for shared in (own, own.T, ns.BlockSparse(own.values[:], own.layout)):
        other.weight.data = shared
        with pytest.raises(ValueError, match=r"0\.weight and 1\.weight share their values in two"):
            prune(nn.Sequential(first, other), 0.1)


@pytest.mark.parametrize("gates", [(True, False), (False, True), (True, True)])
def test_a_shared_weight_has_one_gate(gates):
    """Blocks that the gate of one layer drops the other would lack."""
    first, second = (
        nn.Linear(16, 16, block_size=4, gate=gate, seed=i) for i, gate in enumerate(gates)
    )
    second.weight = first.weight
    model, data = nn.Sequential(first, nn.ReLU(), second), first.weight.data
    for change in (lambda: prune(model, 0.5), lambda: nn.utils.compact(model),
                   lambda: GradualPruning(model, 0.5, stop=2)):  # fmt: skip
        with pytest.raises(ValueError, match="0 and 2 share a weight but not a gate"):
            change()
    assert first.weight.data is data
    second.gate = first.gate
    assert set(prune(model, 0.5)) == {"0.weight"}
    assert model(np.ones((2, 16), np.float32)).shape == (2, 16)


@pytest.mark.parametrize(
    "make",
    [
        lambda: (nn.LSTM(6, 10, block_size=4, seed=0), (3, 2, 6)),
        lambda: (nn.Conv2d(3, 9, 3, block_size=4, seed=0), (2, 6, 6, 3)),
    ],
    ids=["LSTM", "Conv2d"],
)
def test_other_layers_are_pruned_too(make):
    model, shape = make()
    densities = prune(model, 0.4)
    assert 0 < max(densities.values()) < 0.5
    y = model(np.random.default_rng(0).standard_normal(shape).astype(np.float32))
    F.sum(y if isinstance(y, ns.Tensor) else y[0]).backward()
    for p in weights_of(model).values():
        assert p.grad.data.layout == p.data.layout


@pytest.mark.parametrize("is_module", [False, True], ids=["parameter", "module"])
def test_a_gate_is_of_one_weight(is_module):
    """The gate cannot follow both where other blocks of each are the largest."""
    first, second = (nn.Linear(16, 16, block_size=4, gate=not is_module, seed=i) for i in range(2))
    model = nn.Sequential(first, nn.ReLU(), second)
    if is_module:
        nn.utils.HardConcrete(model, 0.5)
    second.gate, data = first.gate, first.weight.data
    changes = (
        lambda: nn.utils.prune(model, density=0.5),
        lambda: nn.utils.compact(model),
        lambda: nn.utils.Rewiring(model, grow="random"),
    )
    for change in changes:
        with pytest.raises(ValueError, match="0 and 2 share a gate but not a weight"):
            change()
    assert first.weight.data is data


@draws(20, "gates of weights with a norm")
@given(st.integers(0, 2**20))
def test_gates_follow_a_weight_that_is_normalised(seed):
    """Pruned, it is g * v / ||v|| of the blocks that are left, times their gates."""
    rng = np.random.default_rng(seed)
    pattern = rng.random((3, 4)) < 0.7
    pattern[rng.integers(3), rng.integers(4)] = True
    how = {"layout": pattern, "block_size": 4, "gate": True, "bias": False, "seed": 0}
    layer = weight_norm(nn.Linear(11, 14, dtype=np.float64, **how))
    optimizer = optim.Adam(layer.parameters())
    layer.weight_g.data = rng.standard_normal(14)
    n, dropped = layer.weight_v.data.n_blocks, rng.random((2, pattern.sum())) < 0.3
    dropped[0] |= dropped[1]
    dropped[:, rng.integers(n)] = False
    layer.gate.data.values[:] = np.where(dropped[0], 0, rng.random(n))[:, None, None]
    layer.weight_v.data.values[dropped[1]] = 0
    dense = layer.weight_v.data.toarray()
    x = rng.standard_normal((5, 11))
    before = layer(x).numpy()
    assert compact(layer, remap=optimizer) == {"weight_v": (n - dropped[1].sum()) / 12}
    np.testing.assert_allclose(layer(x).numpy(), before, rtol=0, atol=1e-12)
    norms = layer.weight_v.data.block_norms() * layer.gate.data.values.reshape(-1)
    count = int(rng.integers(1, norms.size + 1))
    prune(layer, density=count / 12, remap=optimizer)
    layout = layer.weight_v.data.layout
    assert layer.gate.data.layout == layout
    assert layout.n_blocks == count
    blocks = np.kron(layout.pattern, np.ones((4, 4)))[:11, :14]
    gates = np.kron(layer.gate.data.toarray(), np.ones((4, 4)))[:11, :14]
    lengths = np.sqrt((dense**2 * blocks).sum(0) + 1e-12)
    right = x @ (layer.weight_g.data * dense * blocks / lengths * gates)
    loss = layer(x)
    np.testing.assert_allclose(loss.numpy(), right, rtol=0, atol=1e-12)
    loss.sum().backward()
    optimizer.step()


def test_of_equal_blocks_the_first_are_kept():
    layer = nn.Linear(64, 64, block_size=4)
    layer.weight.data.values[:] = 1
    prune(layer, 0.5)
    assert layer.weight.data.layout.pattern[:8].all()


def test_what_is_beyond_the_features_of_a_tap_counts_for_nothing():
    one, two = (nn.Conv2d(3, 9, 3, block_size=4, seed=0) for _ in range(2))
    two.weight.data.values[two.weight.data.block_norms().argmin(), 3] = 100
    for layer in (one, two):
        prune(layer, 0.4)
    assert one.weight.data.layout == two.weight.data.layout


class Failing:
    """Follows so often, and then has no memory left."""

    def __init__(self, left):
        self.left = left

    def remap(self):
        self.left -= 1
        if self.left < 0:
            raise ValueError("this one cannot follow")


@pytest.mark.parametrize("edit", ["prune", "grow", "swap", "resume"])
def test_after_a_failed_edit_all_is_as_it_was(edit):
    """The second of two that follow fails when the network and the first have changed."""
    model = model_of(gate=True)
    prune(model, 0.6)
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    average = optim.ExponentialMovingAverage(model.parameters(), 0.5)
    train(model, optimizer, range(2), [average])
    saved = GradualPruning(model, 0.3, stop=9).state_dict()
    # Of growth the candidates' coming succeeds; then they go, and others come for good.
    failing = Failing({"grow": 4}.get(edit, 1))
    how = {"remap": [optimizer, average, failing]}
    rules = {"grow": "gradient", "swap": "degrees"}
    if edit in rules:
        rewiring = nn.utils.Rewiring(model, 0.5, grow=rules[edit], every=2, seed=0, **how)
        rewiring.step()
        train(model, optimizer, range(2, 3), [average])
        call = rewiring.step
    elif edit == "resume":
        pruning = GradualPruning(model, 0.3, stop=9, **how)
        saved["layouts"]["0.weight"] = {"indptr": np.arange(6), "indices": np.arange(5)}

        def call():
            pruning.load_state_dict(saved)
    else:

        def call():
            prune(model, 0.3, **how)

    before = [(p, p.data, p.grad) for p in model.parameters()]
    states = [one.state_dict() for one in (optimizer, average)]
    with pytest.raises(ValueError, match="this one cannot follow"):
        call()
    for p, data, grad in before:
        assert p.data is data
        assert p.grad is grad
    for old, one in zip(states, (optimizer, average), strict=True):
        for key, value in one.state_dict().items():
            then = old[key]
            if isinstance(value, ns.BlockSparse):
                assert value.layout == then.layout
                value, then = value.data, then.data
            np.testing.assert_array_equal(value, then, err_msg=key)
    train(model, optimizer, range(3, 4), [average])  # which fits still


def test_a_schedule_refuses_at_once_what_would_fail_in_time():
    model = model_of()
    with pytest.raises(ValueError, match=r"density 0\.01 leaves 0\.weight none of its 30 blocks"):
        GradualPruning(model, 0.01, stop=100)
    GradualPruning(model, 0.03, stop=100, scope="model")  # layers compete: only time tells


def test_a_gate_of_another_layout_is_refused():
    for kept in ([0, 1, 2], [0]):
        model = model_of(gate=True)
        wrong = model[0].gate.data.layout.select(np.isin(np.arange(30), kept))
        model[0].gate.data = model[0].gate.data.remap(wrong)
        before = model[0].weight.data
        for call in (lambda: prune(model, 0.5), lambda: nn.utils.compact(model)):  # noqa: B023
            with pytest.raises(ValueError, match=r"the gate of 0\.weight takes its layout, .* got"):
                call()
        assert model[0].weight.data is before


def test_where_it_is_refused_nothing_changes():
    model = model_of()
    weights = weights_of(model)
    before = {name: p.data for name, p in weights.items()}
    model[0].weight.data.values[0, 0, 0] = 1e-3
    mixed = nn.Sequential(model[0], nn.Linear(24, 8, block_size=8))

    def refused(kind, words, *args, of=model, **how):
        with pytest.raises(kind, match=words):
            prune(of, *args, **how)
        assert all(weights[name].data is data for name, data in before.items())

    refused(ValueError, r"density 0\.01 of the layer leaves 0\.weight none of its 30", 0.01)
    refused(ValueError, "leaves 0.weight none .* keep more, use scope", 0.02, scope="model")
    refused(ValueError, r"threshold 100 leaves 0\.weight none", threshold=100)
    refused(
        ValueError, "exactly one of density and threshold must be given, got both", 1, threshold=1
    )
    refused(ValueError, "got neither")
    refused(ValueError, "density takes a number from 0 to 1, got 1.5", 1.5)
    refused(ValueError, "by takes one of l1, l2, max, got 'l0'", 0.5, by="l0")
    refused(ValueError, "scope takes one of layer, model, got 'net'", 0.5, scope="net")
    refused(TypeError, "remap takes optimizers and averages, got int", 0.5, remap=[3])
    refused(TypeError, "remap takes optimizers and averages, got NoneType", 0.5, remap=None)
    slotted = type("Slotted", (), {"__slots__": (), "remap": lambda self: None})()
    refused(TypeError, "remap takes optimizers and averages, got .*Slotted", 0.5, remap=slotted)
    refused(ValueError, r"blocks of one size, got \{'0.weight': 4, '1.weight': 8\}", 0.5,
            scope="model", of=mixed)  # fmt: skip
    refused(ValueError, "with a block-sparse Parameter, got none", 0.5, of=nn.ReLU())
    refused(TypeError, r"model\[1\] takes a Parameter, got int", 0.5, of=[model[0].weight, 3])

    refused(ValueError, "this one cannot follow", 0.5, remap=Failing(0))
    model[2].weight.data.values[1, 0, 0] = np.nan
    refused(ValueError, r"2\.weight takes finite values to be pruned", 0.5)


def test_a_weight_without_blocks_stays_as_it_is():
    layers = [nn.Linear(8, 8, layout=of, block_size=4) for of in (np.zeros((2, 2)), None)]
    assert prune(nn.Sequential(*layers), 0.5) == {"0.weight": 0, "1.weight": 0.5}
    for scope in ("layer", "model"):
        pruning = GradualPruning(nn.Sequential(*layers), 0.25, stop=2, scope=scope)
        pruning.step()
        pruning.step()
        assert [layer.weight.data.n_blocks for layer in layers] == [0, 2 if scope == "model" else 1]
        layers[1].weight.data = layers[1].weight.data.remap(np.ones((2, 2)))


def test_a_schedule_changes_nothing_before_it_starts_nor_after_it_stops():
    """Also not what is more, or less, dense than all weights together."""
    dense, sparse = (nn.Linear(16, 16, layout=of, block_size=4) for of in (None, np.eye(4)))
    pruning = GradualPruning(nn.Sequential(dense, sparse), 0.2, start=3, stop=5)
    for n in (16, 16, 10, 4, 3, 3):
        pruning.step()
        assert (dense.weight.data.n_blocks, sparse.weight.data.n_blocks) == (n, min(n, 4))
    dense.weight.data = dense.weight.data.remap(np.ones((4, 4)))
    pruning.step()
    assert dense.weight.data.n_blocks == 16


def test_the_schedule_is_the_cubic_of_the_paper():
    model = model_of((64, 64, 64))
    pruning = GradualPruning(model, 0.1, start=10, stop=50, every=15)
    seen = []
    for step in range(1, 60):
        before = model[0].weight.data
        pruning.step()
        after = model[0].weight.data
        if after is not before:
            sparsity = 0.9 + (0 - 0.9) * (1 - (step - 10) / 40) ** 3  # equation 1
            assert after.n_blocks == round((1 - sparsity) * 256)
            seen.append(step)
    assert seen == [25, 40, 50]
    assert pruning.density_at(0) == 1
    assert pruning.density_at(99) == 0.1
    with pytest.raises(ValueError, match="stop takes an integer of at least 6"):
        GradualPruning(model, 0.1, start=5, stop=5)


def begun(density=1.0):
    model = model_of()
    prune(model, density)
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    average = optim.ExponentialMovingAverage(model.parameters(), 0.5)
    followers = [optimizer, average]
    pruning = GradualPruning(model, 0.3, stop=9, every=2, scope="model", remap=followers)
    return {"pruning": pruning, "model": model, "optimizer": optimizer, "average": average}


def test_training_resumes_bit_for_bit_with_its_layouts(tmp_path):
    parts, resumed = begun(), begun(0.5)  # the second is to become the first

    def go_on(parts, steps):
        after = [parts["average"], parts["pruning"]]
        train(parts["model"], parts["optimizer"], steps, after)

    go_on(parts, range(5))
    ns.save(tmp_path / "state.npz", {name: part.state_dict() for name, part in parts.items()})
    go_on(parts, range(5, 10))
    go_on(resumed, range(20, 21))  # its state and layouts go
    state = ns.load(tmp_path / "state.npz")
    for name, part in resumed.items():
        part.load_state_dict(state[name])
    go_on(resumed, range(5, 10))
    assert parts["model"][0].weight.data.density < 0.5
    ends = [{n: part.state_dict() for n, part in end.items()} for end in (parts, resumed)]
    for name in parts:
        for key, value in ends[0][name].items():
            other = ends[1][name][key]
            if isinstance(value, ns.BlockSparse):
                assert value.layout == other.layout
                value, other = value.data, other.data
            np.testing.assert_equal(value, other, err_msg=f"{name}.{key}")
    for broken in ({}, {**state["pruning"], "layouts": {}}, {**state["pruning"], "steps": -1}):
        with pytest.raises(ValueError, match="state"):
            resumed["pruning"].load_state_dict(broken)
    layouts = state["pruning"]["layouts"]
    for wrong in (3, {"indptr": layouts["0.weight"]["indptr"]}):
        broken = {**state["pruning"], "layouts": {**layouts, "0.weight": wrong}}
        with pytest.raises(ValueError, match=r"\['0.weight'\] takes indptr and indices, got"):
            resumed["pruning"].load_state_dict(broken)


def test_a_captured_step_is_captured_anew(rng):
    """On a GPU replays would else write into blocks that are gone."""
    if device.SIMULATED or not device.is_available():
        pytest.skip("steps are captured on a GPU")
    results = []
    for wrap in (ns.graph, lambda step: step):
        model = model_of().to("cuda")
        optimizer = optim.Adam(model.parameters(), lr=0.01)

        def step(x, model=model, optimizer=optimizer):
            loss = F.mean(model(x) * model(x))
            model.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        call = wrap(step)
        for i in range(9):
            if i in (4, 7):
                prune(model, 2 / i, remap=optimizer)
            x = np.random.default_rng(i).standard_normal((6, 20), dtype=np.float32)
            loss = call(ns.to_device(x))
        results.append((float(loss.item()), host(model[0].weight.data)))
    assert results[0][0] == results[1][0]
    np.testing.assert_array_equal(results[0][1], results[1][1])
