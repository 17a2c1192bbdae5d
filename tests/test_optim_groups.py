"""Groups of parameters: each steps by its own settings, through schedules, files and remapping."""

import numpy as np
import pytest
from conftest import host

import numbsparse as ns
from numbsparse import device, nn
from numbsparse.nn import optim

DRAWN = {  # settings of three groups; what one lacks comes from the arguments
    "SGD": ({"momentum": 0.5}, {"lr": 0.3, "momentum": 0.0}, {"weight_decay": 0.1, "nesterov": True,
                                                              "momentum": 0.9}),
    "Adam": ({}, {"lr": 0.3, "betas": (0.5, 0.9)}, {"weight_decay": 0.1, "eps": 1e-3}),
    "AdamW": ({"weight_decay": 0.0}, {"lr": 0.3}, {"betas": (0.0, 0.5)}),
}  # fmt: skip
NAMES = sorted(DRAWN)


def tensors(rng, put, counts=(2, 1, 1)):
    """Parameters of each group, block-sparse and dense."""
    pattern = np.array([[0, 1], [1, 1]], bool)
    made = []
    for i, count in enumerate(counts):
        sparse = nn.init.uniform(pattern, 4, seed=i)
        dense = rng.standard_normal(5, dtype=np.float32)
        made.append([nn.Parameter(put(data)) for data in (sparse, dense)[:count]])
    return made


def grouped(name, groups, **settings):
    made = [{"params": g, **own} for g, own in zip(groups, DRAWN[name], strict=True)]
    return getattr(optim, name)(made, **{"lr": 0.1, **settings})


def step(optimizers, parameters, seed):
    """A step of all, by gradients drawn for each parameter."""
    rng = np.random.default_rng(seed)
    for p in parameters:
        gradient = rng.standard_normal(p.values.shape, dtype=np.float32)
        gradient = ns.to_device(gradient) if p.place == "cuda" else gradient
        sparse = isinstance(p.data, ns.BlockSparse)
        p.grad = ns.Tensor(p.data.with_values(gradient) if sparse else gradient)
    for optimizer in optimizers:
        optimizer.step()


def flat(groups):
    return [p for group in groups for p in group]


def same(ours, theirs):
    for p, q in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(host(p.data), host(q.data))


@pytest.mark.parametrize("name", NAMES)
def test_a_group_steps_as_an_optimizer_of_its_own(rng, put, name):
    """Bit for bit, a falling learning rate and one skipped step included."""
    ours, theirs = (tensors(np.random.default_rng(3), put) for _ in range(2))
    together = grouped(name, ours)
    apart = [getattr(optim, name)(group, **{"lr": 0.1, **own})
             for group, own in zip(theirs, DRAWN[name], strict=True)]  # fmt: skip
    for seed in range(4):
        for group, optimizer in zip(together.param_groups, apart, strict=True):
            group["lr"] = optimizer.lr = optimizer.param_groups[0]["initial_lr"] / (1 + seed)
        step([together], flat(ours), seed)
        step(apart, flat(theirs), seed)
        same(flat(ours), flat(theirs))
    scalers = optim.LossScaler(1.0), optim.LossScaler(1.0)
    for size in (1.0, np.inf, 1.0):
        for p in (ours[0][1], theirs[0][1]):
            p.grad = ns.Tensor(put(np.full(5, size, np.float32)))
        scalers[0].step(together)
        scalers[1].step(*apart)
        same(flat(ours), flat(theirs))
    assert together.state_dict()["skipped"] == 1


@pytest.mark.parametrize("name", NAMES)
def test_another_dict_in_the_place_of_a_group_is_followed(rng, name):
    ours, theirs = (tensors(np.random.default_rng(3), lambda a: a) for _ in range(2))
    replaced, changed = grouped(name, ours), grouped(name, theirs)
    for seed in range(3):
        step([replaced], flat(ours), seed)
        step([changed], flat(theirs), seed)
        same(flat(ours), flat(theirs))
        i, lr = rng.integers(3), rng.uniform()
        replaced.param_groups[i] = {**replaced.param_groups[i], "lr": lr}
        changed.param_groups[i]["lr"] = lr


@pytest.mark.parametrize("name", NAMES)
def test_groups_go_on_from_a_file(rng, put, tmp_path, name):
    groups, others = (tensors(np.random.default_rng(3), put) for _ in range(2))
    made = grouped(name, groups)
    schedule = optim.LambdaLR(made, lambda step: 1 / (1 + step))
    for seed in range(3):
        step([made], flat(groups), seed)
        schedule.step()
    state = {"optimizer": made.state_dict(), "schedule": schedule.state_dict()}
    nn.save(tmp_path / "state", state)
    loaded = nn.load(tmp_path / "state")
    assert [g["params"] for g in loaded["optimizer"]["param_groups"]] == [2, 1, 1]
    for p, q in zip(flat(groups), flat(others), strict=True):
        q.data = p.data.copy() if p.place == "cpu" else put(
            p.data.to("cpu") if isinstance(p.data, ns.BlockSparse) else p.data.numpy())  # fmt: skip
    other = grouped(name, others)
    again = optim.LambdaLR(other, lambda step: 1 / (1 + step))
    other.load_state_dict(loaded["optimizer"])
    again.load_state_dict(loaded["schedule"])
    assert [g["lr"] for g in other.param_groups] == [g["lr"] for g in made.param_groups]
    for seed in (3, 4):
        step([made], flat(groups), seed)
        step([other], flat(others), seed)
        schedule.step()
        again.step()
        same(flat(groups), flat(others))


def test_states_of_other_groups_are_refused(rng):
    groups = tensors(rng, lambda a: a)
    several, one = grouped("Adam", groups), optim.Adam(flat(groups))
    sgd = optim.SGD(flat(groups), 0.1).state_dict()
    states = several.state_dict(), one.state_dict()
    for optimizer, state in zip((several, one), states, strict=True):
        before = settings_of(optimizer)
        optimizer.param_groups[0].update(lr=0.7, betas=(0.1, 0.2), eps=1.0)
        optimizer.load_state_dict(state)
        assert settings_of(optimizer) == before

    def second(**odd):
        """The state of several groups, the second with odd values."""
        groups = [dict(group) for group in states[0]["param_groups"]]
        groups[1] |= odd
        return states[0] | {"param_groups": groups}

    before = settings_of(several)
    for optimizer, state, says in (
        (one, states[0], r"of other groups: it has \[2, 1, 1\] parameters, here are \[4\]"),
        (several, states[1], r"of other groups: it has \[4\] parameters, here are \[2, 1, 1\]"),
        (several, second(params=2), r"of other groups: it has \[2, 2, 1\]"),
        (several, states[0] | {"param_groups": 0.1}, r"'param_groups'\] takes a list of dicts"),
        (several, states[0] | {"param_groups": [0.1] * 3}, r"'param_groups'\] takes a list of"),
        (one, sgd, r"'param_groups'\]\[0\] takes lr, betas, .*, got .*'momentum'"),
        (several, second(more=1), r"'param_groups'\]\[1\] takes lr, betas, .*, got .*'more'"),
        (several, second(lr="x"), r"^state\['param_groups'\]\[1\]: lr takes"),
        (several, second(betas=(0.5, 1.5)), r"^state\['param_groups'\]\[1\]: betas\[1\] takes"),
        (several, second(initial_lr=-1), r"^state\['param_groups'\]\[1\]\['initial_lr'\] takes"),
    ):
        with pytest.raises((TypeError, ValueError), match=says):
            optimizer.load_state_dict(state)
    assert settings_of(several) == before


def settings_of(optimizer):
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


def test_a_setting_of_all_groups_is_an_attribute():
    p, q = nn.Parameter([1.0]), nn.Parameter([1.0])
    optimizer = optim.Adam([{"params": p}, {"params": [q], "lr": 0.5, "name": "head"}], lr=0.1)
    assert optimizer.parameters == [p, q]
    assert [g["params"] for g in optimizer.param_groups] == [(p,), (q,)]
    assert (optimizer.betas, optimizer.eps) == ((0.9, 0.999), 1e-8)
    optimizer.weight_decay = 0.25
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.25, 0.25]
    for call in (lambda: optimizer.lr, lambda: setattr(optimizer, "lr", 1.0)):
        with pytest.raises(
            ValueError, match=r"lr differs .* \[0\.1, 0\.5\]: use param_groups\[i\]"
        ):
            call()
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.5]


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        (lambda p, q: [{"params": [p], "learn": 1.0}], "takes params, lr, .* got 'learn'"),
        (lambda p, q: [{"lr": 1.0}], "which lacks 'params'"),
        (lambda p, q: [{"params": [p]}, q], r"parameters\[1\] takes a group, .* got Parameter"),
        (lambda p, q: [{"params": [p]}, {"params": [p]}], "each tensor once"),
        (lambda p, q: [{"params": [p, p]}], "each tensor once"),
        (lambda p, q: [{"params": []}], "at least one tensor"),
        (lambda p, q: [{"params": [p, 1]}], r"parameters\[1\] takes a Tensor, got int"),
        (lambda p, q: [{"params": p}, {"params": q, "lr": -1}], r"param_groups\[1\]: lr .* -1"),
        (lambda p, q: [{"params": p, "momentum": 1.5}], "^momentum takes .* got 1.5"),
        (lambda p, q: [{"params": p, "nesterov": True}], "nesterov takes"),
    ],
)  # fmt: skip
def test_bad_groups_are_refused(groups, says):
    with pytest.raises((TypeError, ValueError), match=says):
        optim.SGD(groups(nn.Parameter([1.0]), nn.Parameter([2.0])), lr=0.1)


def test_another_group_is_a_dict():
    optimizer = optim.SGD([nn.Parameter([1.0])], lr=0.1)
    with pytest.raises(TypeError, match=r"a group takes a dict of params, lr, .*, got int"):
        optimizer.add_param_group(3)
    assert len(optimizer.param_groups) == 1


def test_a_gradient_that_is_set_is_a_tensor():
    parameter = nn.Parameter([1.0])
    optimizer = optim.Adam([parameter])
    parameter.grad = np.ones(1)
    for call in (
        optimizer.step,
        lambda: optim.LossScaler().step(optimizer),
        lambda: nn.utils.clip_grad_norm([parameter], 1.0),
    ):
        with pytest.raises(TypeError, match=r"(grad|gradients\[0\]) takes a Tensor, got .*ndarray"):
            call()
    assert parameter.data[0] == 1


def test_settings_that_became_bad_are_refused():
    p, q = nn.Parameter([1.0]), nn.Parameter([2.0])
    optimizer = optim.SGD([{"params": p}, {"params": q, "momentum": 0.5}], lr=0.1)
    p.grad = q.grad = ns.Tensor([1.0])
    optimizer.step()
    for settings, says in (
        ({"lr": np.nan}, r"param_groups\[1\]: lr takes"),
        ({"lr": 0.1, "momentum": 2}, r"param_groups\[1\]: momentum takes"),
        ({"momentum": 0.0}, r"parameters\[1\] .* \[\] of float64 are kept, .* \{'velocity'"),
    ):
        optimizer.param_groups[1].update(settings)
        with pytest.raises(ValueError, match=says):
            optimizer.step()
    assert (p.data[0], q.data[0]) == (0.9, 1.9)


def test_a_group_that_was_frozen_is_added(put):
    """It counts its own steps, and what is kept for the others goes on."""
    p, q = (nn.Parameter(put(np.zeros(1, np.float32))) for _ in range(2))
    optimizer, scaler = optim.Adam([p], lr=0.1), optim.LossScaler(1.0, interval=None)
    schedule = optim.LambdaLR(optimizer, lambda step: 0.5)
    for gradient in (1, np.inf, 1):
        p.grad = ns.Tensor(put(np.full(1, gradient, np.float32)))
        scaler.step(optimizer)
    with pytest.raises(ValueError, match="once"):
        optimizer.add_param_group({"params": [p]})
    optimizer.add_param_group({"params": []})  # no parameter, no change
    optimizer.add_param_group({"params": [q], "lr": 0.25})
    schedule.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.05, 0.05, 0.125]
    p.grad = q.grad = ns.Tensor(put(np.ones(1, np.float32)))
    scaler.step(optimizer)
    np.testing.assert_allclose(host(p.data), -3 * 0.05, rtol=1e-5)
    np.testing.assert_allclose(host(q.data), -0.125, rtol=1e-5)
    state = optimizer.state_dict()
    assert [state[key] for key in ("skipped", "0.steps", "1.steps")] == [1, 3, 1]


def test_a_remapped_parameter_keeps_its_group(rng, put):
    p, q = (nn.Parameter(put(nn.init.uniform([[1, 0]], 4, seed=i))) for i in range(2))
    optimizer = optim.SGD([{"params": p}, {"params": q, "lr": 0.5}], lr=0.1, momentum=0.5)
    step([optimizer], [p, q], 0)
    q.data = put(ns.BlockSparse(np.ones((2, 4, 4), np.float32), [[1, 1]]))
    optimizer.remap()
    velocity = host(optimizer.state_dict()["1.velocity"])
    before = host(q.data).copy()
    q.grad = ns.Tensor(q.data.with_values(put(np.ones((2, 4, 4), np.float32))))
    p.grad = None
    optimizer.step()
    expected = before - np.float32(0.5) * (np.float32(0.5) * velocity + 1)
    np.testing.assert_allclose(host(q.data), expected, rtol=1e-6)


def test_a_captured_step_reads_each_group_anew(put, place):
    if place == "cpu" or device.SIMULATED:
        pytest.skip("steps are captured on a GPU")
    p, q = (nn.Parameter(put(np.zeros(1, np.float32))) for _ in range(2))
    optimizer = optim.SGD([{"params": p}, {"params": q, "lr": 0.5}], lr=0.25)

    @ns.graph
    def captured(gradient):
        p.grad = q.grad = ns.Tensor(gradient)
        optimizer.step()

    for factor in (1.0, 0.5):
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        captured(put(np.ones(1, np.float32)))
    assert (host(p.data)[0], host(q.data)[0]) == (-0.375, -0.75)


def test_schedules_want_an_optimizer_and_a_factor_for_each_group():
    optimizer = optim.SGD(
        [{"params": nn.Parameter([1.0])}, {"params": nn.Parameter([1.0])}], lr=1.0
    )
    optim.LambdaLR(optimizer, [lambda step: 0.5, lambda step: 0.25])
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 0.25]
    for factor in (0.5, [1.0, 2.0]):
        with pytest.raises(TypeError, match=r"factor takes a function of the step's .* got "):
            optim.LambdaLR(optimizer, factor)
    with pytest.raises(ValueError, match="factor takes a function for each of 2 groups, got 1"):
        optim.LambdaLR(optimizer, [lambda step: 1.0])
    with pytest.raises(TypeError, match="optimizer takes an Optimizer, got list"):
        optim.LambdaLR([optimizer], lambda step: 1.0)
    with pytest.raises(ValueError, match="state takes steps"):
        optim.LambdaLR(optimizer, lambda step: 1.0).load_state_dict({})


@pytest.mark.parametrize("wrong", [None, "a", -0.5, float("nan")])
def test_a_factor_that_is_none_changes_nothing(wrong):
    groups = [{"params": nn.Parameter([1.0])}, {"params": nn.Parameter([1.0])}]
    optimizer = optim.SGD(groups, lr=1.0)
    schedule = optim.LambdaLR(
        optimizer, [lambda step: 1 / (1 + step), lambda step: [1.0, wrong][step]]
    )
    with pytest.raises((TypeError, ValueError), match=r"factor\(1\) takes a number .* got"):
        schedule.step()
    assert schedule.state_dict() == {"steps": 0}
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 1.0]
