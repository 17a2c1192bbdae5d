"""Structure that is learned: hard-concrete gates and group lasso, steered, compacted, resumed."""

import warnings

import numpy as np
import pytest
from conftest import host
from scipy.special import expit

import numbsparse as ns
from numbsparse import device, nn, ops
from numbsparse.nn import functional as F
from numbsparse.nn.utils import GroupLasso, HardConcrete, compact, weight_norm

pytestmark = pytest.mark.usefixtures("cheap_products")

BETA, GAMMA, ZETA = 2 / 3, -0.1, 1.1


def model_of(seed=0):
    """Two block sizes, features that end within a block."""
    first = nn.Linear(20, 24, block_size=8, seed=seed)
    return nn.Sequential(first, nn.ReLU(), nn.Linear(24, 10, block_size=4, seed=seed + 1))


def put(a, place):
    return ns.to_device(a) if place == "cuda" else a


def clipped(logits):
    return np.clip(expit(logits) * (ZETA - GAMMA) + GAMMA, 0, 1)


def alphas(layer, rng):
    """Other numbers in the place of those at first."""
    own = layer.gate.log_alpha.data
    values = rng.uniform(-5, 5, own.values.shape).astype(np.float32)
    layer.gate.log_alpha.data = own.with_values(put(values, own.place))
    return values.reshape(-1).astype(np.float64)


def test_gates_are_those_of_the_paper(place, rng):
    model = model_of().to(place)
    gates = HardConcrete(model, 0.3, seed=3)
    logits = [alphas(layer, rng) for layer in (model[0], model[2])]
    for layer, own in zip((model[0], model[2]), logits, strict=True):
        gate = layer.gate
        for call in (1, 2):
            noise = ops.logistic_noise(own.size, gate.seed, call, "float64", "cpu")
            right = clipped((noise + own) / BETA)
            np.testing.assert_allclose(host(gate().data), right, atol=1e-5)
        gate.eval()
        np.testing.assert_allclose(host(gate().data), clipped(own), atol=1e-6)
        assert (host(gate().data) == 0).any()
        assert (host(gate().data) == 1).any()
        assert gate.calls == 2
    sizes, grids = (64, 16), (9, 18)
    kept = [expit(own - BETA * np.log(-GAMMA / ZETA)).sum() for own in logits]
    density = np.dot(sizes, kept) / np.dot(sizes, grids)
    np.testing.assert_allclose(host(gates.expected_density().data), density, rtol=1e-5)
    gates.strength = 2.5
    penalty = 2.5 * max(0, density - 0.3)
    np.testing.assert_allclose(host(gates.penalty().data), penalty, rtol=1e-4)
    assert penalty > 0
    gates.step()
    assert gates.strength == pytest.approx(2.5 + 0.1 * (density - 0.3), rel=1e-5)


def test_as_many_gates_are_zero_as_expected(rng):
    layer = nn.Linear(256, 256, block_size=4)
    gates = HardConcrete(layer, 0.5, seed=0)
    alphas(layer, rng)
    drawn = np.mean([(layer.gate().data > 0).mean() for _ in range(10)])
    assert drawn == pytest.approx(gates.expected_density().item(), abs=0.01)


def test_the_gradient_of_a_gate_is_that_of_its_formula():
    noise = ops.logistic_noise(50, 1, 1, "float64", "cpu")
    stretched = nn.utils.hard_concrete._stretched
    gates = np.linspace(-2, 2, 50)
    ns.testing.check_grads(lambda a: stretched((a + noise) / BETA), gates, order=2)


def test_gates_of_a_model_in_evaluation_are_not_drawn():
    layer = nn.Linear(16, 16, block_size=4).eval()
    gates = HardConcrete(layer, 0.5)
    np.testing.assert_allclose(layer.gate().data, clipped(2.0), rtol=1e-6)
    generation = device.generation()
    gates.strength = 2.0  # which a captured step would not see
    assert device.generation() > generation


def test_where_the_density_is_reached_nothing_pushes():
    layer = nn.Linear(16, 16, block_size=4)
    gates = HardConcrete(layer, 0.99)
    gates.strength = 5.0
    gates.penalty().backward()
    assert gates.penalty().item() == 0
    assert (layer.gate.log_alpha.grad.values == 0).all()


def test_the_strength_never_falls_below_0():
    layer = nn.Linear(16, 16, block_size=4)
    gates = HardConcrete(layer, 1.0, rate=100.0)
    gates.strength = 1.0
    gates.step()
    assert gates.strength == 0
    for wrong in (-1.0, float("nan"), None, "1"):
        with pytest.raises((TypeError, ValueError), match="strength takes a number"):
            gates.strength = wrong
    assert gates.strength == 0


def planted(rng):
    true = np.zeros((8, 8), bool)
    true.flat[rng.permutation(64)[:16]] = True
    return true, (np.kron(true, np.ones((4, 4))) * rng.standard_normal((32, 32))).astype("f4")


def fit(model, optimizer, learn, rng, right, steps):
    for _ in range(steps):
        x = rng.standard_normal((32, 32)).astype(np.float32)
        loss = F.mse_loss(model(x), ns.Tensor(x @ right))
        if isinstance(learn, HardConcrete):
            loss = loss + learn.penalty()
        model.zero_grad()
        loss.backward()
        optimizer.step()
        learn.step()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [HardConcrete, GroupLasso])
def test_the_structure_of_the_task_is_found(kind, rng):
    true, right = planted(rng)
    model = nn.Sequential(nn.Linear(32, 32, block_size=4, bias=False, seed=0))
    how = {"rate": 0.3, "seed": 0} if kind is HardConcrete else {"growth": 1.05}
    learn = kind(model, 0.25, **how)
    optimizer = nn.optim.Adam(model.parameters(), lr=0.05)
    fit(model, optimizer, learn, rng, right, 300)
    model.eval()
    before = model(right)
    compact(model, remap=optimizer)
    weight = model[0].weight.data
    assert abs(weight.n_blocks - 16) <= 1
    assert (weight.layout.pattern & true).sum() >= 15
    np.testing.assert_allclose(model(right).numpy(), before.numpy(), rtol=1e-4, atol=1e-4)
    if kind is HardConcrete:
        assert model[0].gate.log_alpha.data.layout == weight.layout
    fit(model.train(), optimizer, learn, rng, right, 2)  # with moments of these blocks


@pytest.mark.parametrize("kind", [HardConcrete, GroupLasso])
def test_training_resumes_bit_for_bit(kind, tmp_path):
    right = planted(np.random.default_rng(0))[1]

    def begun():
        model = nn.Sequential(nn.Linear(32, 32, block_size=4, seed=0))
        learn = kind(model, 0.3, **({"seed": 0} if kind is HardConcrete else {"growth": 1.2}))
        optimizer = nn.optim.Adam(model.parameters(), lr=0.05)
        return {"learn": learn, "model": model, "optimizer": optimizer}

    def go_on(parts, seed):
        rng = np.random.default_rng(seed)
        fit(parts["model"], parts["optimizer"], parts["learn"], rng, right, 20)

    parts, resumed = begun(), begun()
    go_on(parts, 1)
    nn.utils.prune(parts["model"], 0.5, remap=parts["optimizer"])
    ns.save(tmp_path / "state.npz", {name: part.state_dict() for name, part in parts.items()})
    go_on(parts, 2)
    state = ns.load(tmp_path / "state.npz")
    for name, part in resumed.items():
        part.load_state_dict(state[name])
    go_on(resumed, 2)
    assert parts["learn"].strength == resumed["learn"].strength > 0
    one, two = (a["model"].state_dict() for a in (parts, resumed))
    for name, value in one.items():
        if isinstance(value, ns.BlockSparse):
            assert value.layout == two[name].layout
            np.testing.assert_array_equal(value.data, two[name].data)
        else:
            np.testing.assert_array_equal(value, two[name])
    for broken in ({}, {**state["learn"], "layouts": {}}, {**state["learn"], "strength": -1}):
        with pytest.raises(ValueError, match="state"):
            resumed["learn"].load_state_dict(broken)


def test_a_captured_step_draws_anew_and_adapts(place):
    """In the simulator nothing is replayed, but what cannot be captured is refused."""
    if place == "cpu":
        pytest.skip("steps are captured on a GPU")
    results = []
    for wrap in (ns.graph, lambda step: step):
        model = nn.Sequential(nn.Linear(8, 8, block_size=4, seed=0)).to("cuda")
        gates = HardConcrete(model, 0.2, seed=0)
        optimizer = nn.optim.Adam(model.parameters(), lr=0.1)

        def step(x, model=model, gates=gates, optimizer=optimizer):
            loss = F.mse_loss(model(x), ns.Tensor(x)) + gates.penalty()
            model.zero_grad()
            loss.backward()
            optimizer.step()
            gates.step()
            return loss

        call, x = wrap(step), ns.to_device(np.eye(8, dtype=np.float32))
        losses = [float(call(x).item()) for _ in range(4)]
        results.append([*losses, gates.strength, model[0].gate.calls])
    assert len(set(results[0][:4])) == 4
    np.testing.assert_allclose(*results, rtol=1e-5)


def test_recomputed_layers_draw_the_same_gates(rng):
    gradients = []
    for recomputed in (False, True):
        layer = nn.Linear(16, 16, block_size=4, seed=0)
        HardConcrete(layer, 0.5, seed=0)
        alphas(layer, np.random.default_rng(1))
        x = ns.Tensor(np.ones((2, 16), np.float32), requires_grad=True)
        y = nn.recompute(layer, x) if recomputed else layer(x)
        F.sum(y * y).backward()
        gradients.append([a.grad.values for a in (x, layer.weight, layer.gate.log_alpha)])
    for one, two in zip(*gradients, strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("scope", ["layer", "model"])
@pytest.mark.parametrize("turned", [False, True], ids=["", "transposed"])
def test_a_step_of_the_lasso_is_its_proximal_operator(place, scope, turned):
    model = model_of()
    if scope == "model":
        model = nn.Sequential(nn.Linear(20, 24, block_size=4, seed=0), model[2])
        model[0].weight.data = 1.05 * model[0].weight.data
    model.to(place)
    weights = [p for p in model.parameters() if isinstance(p.data, ns.BlockSparse)]
    if turned:
        for p in weights:
            p.data = ns.BlockSparse(p.data.T.data, p.data.layout.T, shape=p.shape[::-1]).T
    lasso = GroupLasso(model, 0.4, strength=0.02, growth=1.5, scope=scope)
    for _ in range(12):
        before = [p.data.to("cpu").astype("float64") for p in weights]
        strength = lasso.strength
        rms = [w.block_norms() / w.block_size for w in before]
        pools = rms if scope == "layer" else [np.concatenate(rms)] * 2
        counts = [round(0.4 * w.layout.pattern.size) for w in before]
        counts = counts if scope == "layer" else [round(0.4 * pools[0].size)] * 2
        lasso.step()
        most = 0
        for p, w, own, pool, n in zip(weights, before, rms, pools, counts, strict=True):
            t = min(strength, np.sort(pool)[::-1][n])
            by = np.where(own > t, 1 - t / np.maximum(own, 1e-9), 0)
            right = w.data * by[:, None, None]
            np.testing.assert_allclose(host(p.data.data), right, rtol=2e-4, atol=1e-6)
            assert p.data.is_transposed == turned
            most = max(most, np.sort(pool)[::-1][n])
        assert lasso.strength == strength * (1.5 if strength < most else 1)
    compact(model)
    if scope == "layer":
        assert [p.data.n_blocks for p in weights] == counts
    else:
        assert sum(p.data.n_blocks for p in weights) == counts[0]
        assert weights[0].data.n_blocks > weights[1].data.n_blocks * 2 > 0


def test_the_lasso_begins_weakly_and_counts_as_an_edit():
    model = model_of()
    lasso = GroupLasso(model, 0.4)
    rms = [p.data.block_norms() / p.data.block_size for p in (model[0].weight, model[2].weight)]
    assert lasso.strength == pytest.approx(np.concatenate(rms).mean() / 1000)
    x = ns.Tensor(np.ones((2, 20), np.float32), requires_grad=True)
    loss = F.sum(model(x))
    lasso.step()
    with pytest.raises(RuntimeError, match="was changed by"):
        loss.backward()


def test_other_layers_take_the_lasso_too():
    layer = nn.Conv2d(3, 9, 3, block_size=4, seed=0)
    lasso = GroupLasso(layer, 0.4, growth=4.0)
    for _ in range(8):
        lasso.step()
    assert compact(layer)["weight"] == pytest.approx(0.4, abs=0.05)


def test_what_cannot_be_steered_is_refused(rng):
    model = model_of()
    with pytest.raises(ValueError, match=r"density 0\.05 leaves 0\.weight none of its 9 blocks"):
        GroupLasso(model, 0.05)
    assert GroupLasso(nn.Linear(8, 8, block_size=8), 0.05, scope="model").strength > 0
    with pytest.raises(ValueError, match="density takes a number from 0 to 1, got 2"):
        GroupLasso(model, 2)
    with pytest.raises(ValueError, match="growth takes a number of at least 1"):
        GroupLasso(model, 0.5, growth=0.5)
    with pytest.raises(ValueError, match="scope takes one of"):
        GroupLasso(model, 0.5, scope="all")
    with pytest.raises(ValueError, match="density takes a number from 0 to 1, got 2"):
        HardConcrete(model, 2)
    with pytest.raises(TypeError, match="model takes a Module, got list"):
        HardConcrete(model.parameters(), 0.5)
    with pytest.raises(ValueError, match="with Linear layers, got one without"):
        HardConcrete(nn.ReLU(), 0.5)
    gated = nn.Sequential(nn.Linear(8, 8, block_size=4), nn.Linear(8, 8, block_size=4, gate=True))
    with pytest.raises(ValueError, match="1 has a gate: give layers without one"):
        HardConcrete(gated, 0.5)
    normed = nn.Sequential(nn.Linear(8, 8, block_size=4), nn.Linear(8, 8, block_size=4))
    weight_norm(normed[1])
    with pytest.raises(ValueError, match=r"1 has weight_norm, .*: give layers without it"):
        HardConcrete(normed, 0.5)
    shared = nn.Sequential(nn.Linear(8, 8, block_size=4), nn.Linear(8, 8, block_size=4))
    shared[1].weight = shared[0].weight
    with pytest.raises(ValueError, match="0 and 1 share a weight, which two gates would part"):
        HardConcrete(shared, 0.5)
    shared[1].weight = nn.Parameter(shared[0].weight.data)
    with pytest.raises(ValueError, match=r"0\.weight and 1\.weight share their values in two"):
        HardConcrete(shared, 0.5)
    with pytest.raises(ValueError, match=r"density 0\.01 leaves Linear layers no block: use 0\.0"):
        HardConcrete(model, 0.01)
    two = nn.Sequential(nn.Linear(32, 32, block_size=4), nn.Linear(32, 32, block_size=16))
    with pytest.raises(ValueError, match=r"density 0\.06 leaves .* use 0\.133 or more"):
        HardConcrete(two, 0.06)  # a block of each has 16 + 256 of 2 * 1024 values
    assert HardConcrete(two, 0.07).density == 0.07
    assert shared[0].gate is gated[0].gate is model[0].gate is None  # nothing was changed
    HardConcrete(model, 0.5)
    model[0].gate.log_alpha.data.values[:] = -9
    before = model[2].weight.data
    with pytest.raises(ValueError, match=r"leaves 0\.weight none of its 9 blocks"):
        compact(model)
    assert model[2].weight.data is before
    state = model.state_dict()
    state["0.gate.calls"] = -1
    with pytest.raises(ValueError, match="calls"):
        model.load_state_dict(state)


def test_a_lasso_grows_from_nothing():
    layer = nn.Linear(32, 32, block_size=4, bias=False, seed=0)
    lasso, still = (GroupLasso(layer, 0.25, strength=0, growth=g) for g in (2.0, 1.0))
    first = GroupLasso(layer, 0.25).strength
    lasso.step()
    still.step()
    assert lasso.strength == pytest.approx(first)
    assert still.strength == 0
    for _ in range(20):
        lasso.step()
    assert compact(layer)["weight"] == 0.25


def test_a_lasso_says_when_a_weight_has_no_block_left():
    model = model_of()
    model[2].weight.data.values[:] *= 1e-3  # all among the least of the model
    model[0] = nn.Linear(20, 24, block_size=4, seed=0)
    lasso = GroupLasso(model, 0.5, strength=0.001, scope="model")
    with pytest.warns(RuntimeWarning, match=r"2\.weight has no block left that is not zero"):
        lasso.step()
    assert not model[2].weight.data.values.any()
    lasso.step()  # is not said again


def test_a_warning_that_is_an_error_leaves_a_whole_step():
    both = []
    for kind, how in (("error", pytest.raises), ("always", pytest.warns)):
        sizes = (10, 24), (24, 20)
        model = nn.Sequential(*(nn.Linear(*of, block_size=4, seed=0) for of in sizes))
        model[0].weight.data.values[:] *= 1e-3
        lasso = GroupLasso(model, 0.5, strength=0.001, scope="model")
        with warnings.catch_warnings(), how(RuntimeWarning, match=r"0\.weight has no block left"):
            warnings.simplefilter(kind)
            lasso.step()
        both.append((*(p.values for p in model.parameters()), lasso.strength))
    for one, other in zip(*both, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_lasso_takes_weights_without_blocks():
    layer = nn.Linear(8, 8, layout=np.zeros((2, 2)), block_size=4)
    lasso = GroupLasso(layer, 0.5)
    lasso.step()
    assert lasso.strength == 0
