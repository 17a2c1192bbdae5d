"""Optimizers against their formulas, clipping, schedules, and a whole step without the host."""

import numpy as np
import pytest
from conftest import host

import numbsparse as ns
from numbsparse import device, nn
from numbsparse.nn import functional as F
from numbsparse.nn import optim


def sgd(p, g, s, lr, momentum=0.0, weight_decay=0.0, nesterov=False):
    g = g + weight_decay * p
    s["v"] = momentum * s.get("v", 0) + g
    return p - lr * (g + momentum * s["v"] if nesterov else s["v"])


def adam(p, g, s, lr, weight_decay=0.0, decoupled=False, betas=(0.9, 0.999), eps=1e-8):
    s["t"] = s.get("t", 0) + 1
    if decoupled:
        p = p - lr * weight_decay * p
    else:
        g = g + weight_decay * p
    s["m"] = betas[0] * s.get("m", 0) + (1 - betas[0]) * g
    s["v"] = betas[1] * s.get("v", 0) + (1 - betas[1]) * g * g
    m, v = s["m"] / (1 - betas[0] ** s["t"]), s["v"] / (1 - betas[1] ** s["t"])
    return p - lr * m / (np.sqrt(v) + eps)


def adamw(*arguments, weight_decay=1e-2, **options):
    return adam(*arguments, weight_decay=weight_decay, decoupled=True, **options)


CASES = {
    "SGD": (optim.SGD, sgd, {"lr": 0.1}),
    "momentum": (optim.SGD, sgd, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "nesterov": (optim.SGD, sgd, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam": (optim.Adam, adam, {"lr": 0.1}),
    "Adam with eps": (optim.Adam, adam, {"lr": 0.1, "eps": 0.3}),
    "Adam with decay": (optim.Adam, adam, {"lr": 0.1, "weight_decay": 0.1, "betas": (0.8, 0.9)}),
    "AdamW": (optim.AdamW, adamw, {"lr": 0.1, "weight_decay": 0.1}),
    "AdamW with eps": (optim.AdamW, adamw, {"lr": 0.1, "betas": (0.7, 0.8), "eps": 0.3}),
}


def test_a_step_without_gradients_is_counted():
    parameter = nn.Parameter(np.ones(2, np.float32))
    optimizer = optim.SGD([parameter], 0.1)
    optimizer.step()
    parameter.grad = ns.Tensor(np.ones(2, np.float32))
    optimizer.step()
    state = optimizer.state_dict()
    assert (state["steps"], state["0.steps"], parameter.data.tolist()) == (
        2,
        1,
        [np.float32(0.9)] * 2,
    )


@pytest.mark.parametrize("name", CASES)
def test_optimizer_follows_its_formula(rng, put, name):
    make, formula, options = CASES[name]
    first = rng.standard_normal((2, 4, 4))
    gradients = rng.standard_normal((4, 2, 4, 4))
    parameter = nn.Parameter(put(ns.BlockSparse(first.astype(np.float32), [[1, 1]])))
    optimizer = make([parameter], **options)
    expected, state = first, {}
    for i, gradient in enumerate(gradients):
        if i == 2:  # through a checkpoint and back
            saved = optimizer.state_dict()
            optimizer = make([parameter], **options)
            optimizer.load_state_dict(saved)
        parameter.grad = ns.Tensor(put(ns.BlockSparse(gradient.astype(np.float32), [[1, 1]])))
        optimizer.step()
        expected = formula(expected, gradient, state, **options)
    np.testing.assert_allclose(host(parameter.data.to("cpu").values), expected, atol=2e-5)


@pytest.mark.parametrize("scaled", [False, True], ids=["step", "scaled step"])
@pytest.mark.simulator
def test_state_moves_with_the_parameters(rng, scaled):
    """A model goes from home to home between steps: as if it had stayed in one."""
    if not device.is_available():
        pytest.skip(device.why_unavailable())
    gradients = rng.standard_normal((4, 8, 8), dtype=np.float32)

    def trained(places):
        layer = nn.Linear(8, 8, bias=False, block_size=8, seed=0)
        adam, scaler = optim.Adam(layer.parameters(), lr=0.1), optim.LossScaler(1.0)
        for place, gradient in zip(places, gradients, strict=True):
            weight = layer.to(place).weight
            w = ns.BlockSparse(gradient[None], weight.data.layout)
            weight.grad = ns.Tensor(w.to(place))
            scaler.step(adam) if scaled else adam.step()
        return host(layer.to("cpu").weight.data.values), adam.state_dict()

    (stayed, state), (moved, moved_state) = trained(["cpu"] * 4), trained(["cpu", "cuda"] * 2)
    np.testing.assert_allclose(moved, stayed, atol=1e-6)
    assert moved_state["steps"] - moved_state["skipped"] == state["steps"] - state["skipped"] == 4


def test_a_step_takes_no_closure():
    """As torch's does; where there was no gradient it was not even looked at."""
    with pytest.raises(TypeError, match="positional argument"):
        optim.SGD([nn.Parameter(np.ones(2))], 0.1).step(lambda: 1.0)


def test_parameters_without_a_gradient_stay(rng):
    parameter = nn.Parameter(np.ones(3))
    optim.Adam([parameter]).step()
    assert (parameter.data == 1).all()


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_clip_grad_norm(rng, put, max_norm):
    arrays = [
        rng.standard_normal((3, 5), dtype=np.float32),
        rng.standard_normal(7, dtype=np.float32),
    ]
    parameters = [nn.Parameter(put(np.zeros_like(a))) for a in arrays]
    for parameter, array in zip(parameters, arrays, strict=True):
        parameter.grad = ns.Tensor(put(array.copy()))
    norm = np.sqrt(sum((a.astype(float) ** 2).sum() for a in arrays))
    assert nn.utils.clip_grad_norm(parameters, max_norm).item() == pytest.approx(norm, rel=1e-5)
    for parameter, array in zip(parameters, arrays, strict=True):
        expected = array * min(1, max_norm / norm)
        np.testing.assert_allclose(host(parameter.grad.data), expected, rtol=1e-5)


def test_schedules():
    assert [optim.warmup(s, 4) for s in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert optim.cosine(0, 10) == 1
    assert optim.cosine(5, 10) == pytest.approx(0.5)
    assert optim.cosine(10, 10, floor=0.1) == pytest.approx(0.1)
    assert optim.cosine(99, 10, floor=0.1) == pytest.approx(0.1)
    for steps in (0.01, 0.5, 1, 2.5, 10):  # of epochs, say
        assert optim.cosine(steps / 2, steps, 0.1) == pytest.approx(0.55)
        assert optim.cosine(steps, steps, 0.1) == pytest.approx(0.1)
        assert optim.warmup_cosine(0.75 * steps, steps, steps / 2) == pytest.approx(0.5)
    assert [optim.cosine(step, 0, 0.1) for step in (0, 1)] == [1, 0.1]
    factors = [optim.warmup_cosine(s, 100, 10, 0.05) for s in range(100)]
    assert factors[9] == factors[10] == 1
    assert (np.diff(factors[:10]) > 0).all()
    assert (np.diff(factors[10:]) < 0).all()


def state(key, array):
    groups = optim.Adam([ns.nn.Parameter(np.ones(3))], 0.1).state_dict()["param_groups"]
    return {"steps": 1, "skipped": 0, "param_groups": groups, key: array}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda p: optim.SGD([], 0.1), "parameters"),
        (lambda p: optim.SGD(p, -1), "lr"),
        (lambda p: optim.SGD(p, float("nan")), "lr"),
        (lambda p: optim.SGD(p, 1, momentum=1.0), "momentum"),
        (lambda p: optim.SGD(p, 1, nesterov=True), "nesterov"),
        (lambda p: optim.SGD([*p, *p], 1), "each tensor once"),
        (lambda p: optim.SGD([p[0] * 2.0], 1), "parameters takes .* got one that was computed"),
        (lambda p: optim.SGD(p, 1, weight_decay=-1), "weight_decay"),
        (lambda p: optim.Adam(p, betas=(1.0, 0.9)), "betas"),
        (lambda p: optim.Adam(p, betas=(0.9,)), "betas"),
        (lambda p: optim.Adam(p, eps=-1), "eps"),
        (lambda p: optim.SGD(p, 1).load_state_dict({"lr": 0.1}), "state lacks 'steps'"),
        (lambda p: optim.Adam(p).load_state_dict(state("0.m", 1.0)), "0.m.* takes an array"),
        (lambda p: nn.utils.clip_grad_norm(p, 0), "max_norm"),
        (lambda p: optim.Adam(p).load_state_dict(state("0.velocity", np.ones(3))), "velocity"),
        (lambda p: optim.Adam(p).load_state_dict(state("5.m", np.ones(3))), "5.m"),
        (lambda p: optim.Adam(p).load_state_dict(state("0.m", np.ones(4))), "0.m"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses(call, says):
    with pytest.raises(ValueError, match=says):
        call([nn.Parameter(np.ones(3))])


@pytest.mark.parametrize(
    "parameters", [nn.Parameter(np.ones(3)), [np.ones(3)]], ids=["no list", "an array"]
)
def test_refuses_what_are_no_tensors(parameters):
    with pytest.raises(TypeError, match="parameters"):
        optim.SGD(parameters, 0.1)


def test_clipping_refuses_a_tensor_for_its_list():
    with pytest.raises(TypeError, match="parameters takes a list"):
        nn.utils.clip_grad_norm(nn.Parameter(np.ones(3)), 1.0)


class TinyModel(nn.Module):
    """Every layer there is, small enough for the simulator."""

    def __init__(self, seed):
        super().__init__()
        rng = np.random.default_rng(seed)
        self.embedding = nn.Embedding(5, 4, seed=rng)
        self.lstm = nn.LSTM(4, 8, layout=[[1, 1], [0, 1]], block_size=4, seed=rng)
        self.norm = nn.LayerNorm(8)
        self.dropout = nn.Dropout(0.2, seed=1)
        self.output = nn.Linear(8, 5, block_size=4, seed=rng)

    def forward(self, codes):
        y, _ = self.lstm(self.embedding(codes))
        return self.output(self.dropout(F.gelu(self.norm(y))))


def test_a_training_step_is_the_same_in_both_homes_and_never_copies_to_the_host(
    rng, put, place, monkeypatch
):
    codes = rng.integers(0, 5, (3, 2)).astype(np.int32)
    models = [TinyModel(0), TinyModel(0).to(place)]
    inputs = [(codes[:-1], codes[1:]), (put(codes)[:-1], put(codes)[1:])]
    losses = []

    def train(model, codes, targets):
        optimizer = optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(2):
            loss = F.cross_entropy(model(codes), targets)
            model.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm(model.parameters(), 0.5)
            optimizer.step()
        losses.append(loss)

    train(models[0], *inputs[0])
    if place == "cuda":

        def refuse(self):
            raise AssertionError("copied to the host")

        with monkeypatch.context() as patch:
            patch.setattr(ns.DeviceArray, "numpy", refuse)
            train(models[1], *inputs[1])
    else:
        train(models[1], *inputs[1])
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-5)
    expected = models[0].state_dict()
    for name, value in models[1].state_dict().items():
        np.testing.assert_allclose(host(value), host(expected[name]), atol=1e-4)


def test_training_learns(rng):
    x = rng.standard_normal((256, 32), dtype=np.float32)
    teacher = nn.Linear(32, 16, layout=np.eye(4, 2), block_size=8, seed=1)
    target = teacher(x).data
    student = nn.Linear(32, 16, layout=np.eye(4, 2), block_size=8, seed=2)
    optimizer = optim.Adam(student.parameters(), lr=0.05)
    for _ in range(150):
        loss = F.mse_loss(student(x), target)
        student.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 1e-4
