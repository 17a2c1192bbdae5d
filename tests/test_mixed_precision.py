"""16-bit parameters with float32 masters, loss scaling, and both through checkpoints and graphs."""

import numpy as np
import pytest
from conftest import HALVES, host

import numbsparse as ns
from numbsparse import device, nn
from numbsparse.dtypes import as_dtype
from numbsparse.nn import functional as F
from numbsparse.nn import optim
from numbsparse.nn.optim import LossScaler
from numbsparse.nn.utils import clip_grad_norm

pytestmark = pytest.mark.usefixtures("cheap_products")

needs_a_gpu = pytest.mark.skipif(not device.is_available(), reason="no GPU and no simulator")
in_halves = pytest.mark.parametrize("dtype", HALVES)

OPTIMISERS = {
    "SGD": lambda p: optim.SGD(p, 1e-5),
    "momentum": lambda p: optim.SGD(p, 1e-5, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda p: optim.AdamW(p, 1e-5, weight_decay=0.1),
}
CALLS = 3 if device.SIMULATED else 6


def parameter_of(values, dtype):
    return nn.Parameter(ns.to_device(np.asarray(values, as_dtype(dtype))))


def set_gradient(parameter, gradient):
    values = np.asarray(gradient, parameter.dtype)
    parameter.grad = ns.Tensor(ns.to_device(values) if parameter.place == "cuda" else values)


def in_16_bits(dtype):
    """A model of one linear layer in 16 bits, and a step of it with every part."""
    model = nn.Linear(8, 4, block_size=4, layout=[[1], [1]], dtype=dtype, seed=0).to("cuda")
    optimizer, scaler = optim.AdamW(model.parameters(), 1e-3), LossScaler(2.0**8, interval=2)

    def step(x):
        loss = F.mse_loss(model(ns.Tensor(x)), 0.5)
        model.zero_grad()
        scaler.scale(loss).backward()
        norm = clip_grad_norm(model.parameters(), 0.5, scaler=scaler)
        scaler.step(optimizer)
        return loss, norm

    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    return parts, step


def inputs(dtype, bad=()):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((CALLS, 3, 8)).astype(as_dtype(dtype))
    for i in bad:
        x[i, 0, 0] = np.inf
    return [ns.to_device(each) for each in x]


def states(parts):
    return {name: part.state_dict() for name, part in parts.items()}


def assert_same_states(got, expected):
    assert got.keys() == expected.keys()
    for name in got:
        assert got[name].keys() == expected[name].keys()
        for key, value in got[name].items():
            right = expected[name][key]
            if key == "param_groups":
                assert value == right
                continue
            values = value.values if isinstance(value, ns.BlockSparse) else value
            right = right.values if isinstance(right, ns.BlockSparse) else right
            assert np.asarray(values).tobytes() == np.asarray(right).tobytes(), (name, key)


@needs_a_gpu
@in_halves
@pytest.mark.parametrize("name", OPTIMISERS)
def test_steps_too_small_for_16_bits_add_up_in_the_master(rng, name, dtype):
    first = rng.uniform(0.5, 1, 7).astype(as_dtype(dtype))
    parameter = parameter_of(first, dtype)
    wide = nn.Parameter(first.astype(np.float32))
    optimizers = OPTIMISERS[name]([parameter]), OPTIMISERS[name]([wide])
    for _ in range(5):
        gradient = rng.uniform(0.5, 1, 7).astype(as_dtype(dtype))
        set_gradient(parameter, gradient)
        set_gradient(wide, gradient)
        for optimizer in optimizers:
            optimizer.step()
    master = optimizers[0].state_dict()["0.master"]
    assert master.dtype == np.float32
    assert (master < first.astype(np.float32)).all()
    np.testing.assert_allclose(master, wide.numpy(), rtol=5 * 2**-23)
    np.testing.assert_array_equal(parameter.numpy(), master.astype(as_dtype(dtype)))
    assert (parameter.numpy() == first).any()  # what rounding would have lost


@needs_a_gpu
@in_halves
def test_a_master_follows_weights_that_are_set(rng, dtype):
    parameter = parameter_of(rng.uniform(0.5, 1, 4), dtype)
    optimizer = optim.SGD([parameter], 1e-5)
    set_gradient(parameter, np.ones(4))
    optimizer.step()
    kept = optimizer.state_dict()["0.master"]
    values = parameter.numpy()
    values[:2] = 0, 3
    parameter.data = ns.to_device(values)
    optimizer.step()
    expected = np.float32([0, 3, kept[2], kept[3]]) - np.float32(1e-5)
    np.testing.assert_allclose(optimizer.state_dict()["0.master"], expected, rtol=2**-23)


@needs_a_gpu
@in_halves
@pytest.mark.parametrize("order", [1, -1], ids=["model first", "optimizer first"])
def test_training_resumes_bit_for_bit_from_a_file(tmp_path, dtype, order):
    x = inputs(dtype, bad=[1])
    parts, step = in_16_bits(dtype)
    for each in x[:2]:
        step(each)
    nn.save(tmp_path / "c.npz", states(parts))
    for each in x[2:]:
        step(each)
    others, step = in_16_bits(dtype)
    step(x[0])  # a past of its own, which loading forgets
    loaded = nn.load(tmp_path / "c.npz")
    assert loaded["optimizer"]["skipped"] == 1
    for name, part in list(others.items())[::order]:
        part.load_state_dict(loaded[name])
    for each in x[2:]:
        step(each)
    assert_same_states(states(others), states(parts))


@needs_a_gpu
@pytest.mark.parametrize("dtype", [*HALVES, "float32"])
def test_a_captured_step_scales_skips_and_counts_as_an_uncaptured_one(dtype):
    seen = []
    for captured in (False, True):
        parts, step = in_16_bits(dtype)
        step = ns.graph(step) if captured else step
        results = [step(x) for x in inputs(dtype, bad=[1])]
        numbers = [host(tensor.data) for pair in results for tensor in pair]
        seen.append((numbers, states(parts)))
    (numbers, expected), (captured_numbers, got) = seen
    np.testing.assert_array_equal(captured_numbers, numbers)
    assert_same_states(got, expected)
    good = CALLS - 1 - 1  # after the bad one, which came second
    assert expected["optimizer"]["skipped"] == 1
    assert expected["scaler"] == {"scale": 2.0 ** (7 + good // 2), "good_steps": good % 2}
    assert not np.isfinite(numbers[3])


def test_a_skipped_step_leaves_no_trace(rng, put, place):
    first = rng.standard_normal(5, dtype=np.float32)
    gradients = rng.standard_normal((3, 5)).astype(np.float32)
    seen = []
    for bad in (False, True):
        parameter = nn.Parameter(put(first.copy()))
        optimizer = optim.Adam([parameter], 0.1)
        scaler = LossScaler(1.0, interval=None)
        scaler.array_in(place)
        for i, gradient in enumerate(gradients):
            if bad and i < 2:
                set_gradient(parameter, np.where(np.arange(5) == i, [np.nan, np.inf][i], gradient))
                scaler.step(optimizer)
            set_gradient(parameter, gradient)
            scaler.step(optimizer)
        state = optimizer.state_dict()
        assert state["steps"] - state["skipped"] == 3
        seen.append([parameter.numpy(), state["0.m"], state["0.v"]])
    np.testing.assert_array_equal(*seen)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_scaling_by_a_power_of_two_changes_nothing(rng, put, place, name):
    first = rng.standard_normal((3, 5), dtype=np.float32)
    x = rng.standard_normal((4, 3, 5), dtype=np.float32)
    seen = []
    for scaler in (LossScaler(1.0), LossScaler(2.0**10, interval=2)):
        parameter = nn.Parameter(put(first.copy()))
        optimizer = OPTIMISERS[name]([parameter])
        for each in x:
            loss = (parameter * put(each)).sum()
            parameter.grad = None
            scaler.scale(loss).backward()
            norm = clip_grad_norm([parameter], 2.0, scaler=scaler)
            scaler.step(optimizer)
        expected = np.linalg.norm(each)
        np.testing.assert_allclose(norm.numpy(), expected, rtol=1e-6)
        seen.append(parameter.numpy())
    np.testing.assert_array_equal(*seen)
    assert scaler.state_dict() == {"scale": 2.0**12, "good_steps": 0}


@pytest.mark.parametrize("make", [optim.SGD, optim.Adam, optim.AdamW])
def test_a_step_with_a_scale_of_1_is_a_step(rng, put, place, make):
    """Its numbers, weight decay among them, come from another place."""
    first, gradient = (rng.standard_normal(7).astype(np.float32) for _ in range(2))
    seen = []
    for scaler in (None, LossScaler(1.0)):
        parameter = nn.Parameter(put(first.copy()))
        optimizer = make([parameter], 0.1, weight_decay=0.5)
        for _ in range(3):
            parameter.grad = ns.Tensor(put(gradient))
            optimizer.step() if scaler is None else scaler.step(optimizer)
        seen.append(parameter.numpy())
    np.testing.assert_allclose(*seen, rtol=1e-5)


@needs_a_gpu
def test_float16_gradients_that_would_vanish_arrive():
    moved = []
    for scale in (1.0, 2.0**12):
        x = ns.Tensor(ns.to_device(np.full((1, 4), 2.0**-13, np.float16)))
        model = nn.Linear(4, 4, block_size=4, dtype="float16", bias=False, seed=0).to("cuda")
        optimizer, scaler = optim.SGD(model.parameters(), 2.0**20), LossScaler(scale)
        before = model.weight.numpy()
        loss = model(x).astype("float32").sum() * 2.0**-13
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        moved.append(before - model.weight.numpy())
    assert (moved[0] == 0).all()
    np.testing.assert_allclose(moved[1], 2.0**-6, rtol=0.05)


@needs_a_gpu
def test_a_parameter_without_a_gradient_may_be_elsewhere(rng):
    values = rng.standard_normal(3, dtype=np.float32)
    near, far = nn.Parameter(values.copy()), nn.Parameter(ns.to_device(values))
    scaler = LossScaler()
    scaler.scale((near * near).sum()).backward()
    scaler.step(optim.SGD([near, far], 0.1))
    np.testing.assert_allclose(near.data, values - 0.1 * 2 * values, rtol=1e-5, atol=1e-6)


def test_the_scale_stays_within_its_bounds():
    parameter = nn.Parameter(np.zeros(1, np.float32))
    for first, gradient, last in ((2.0**24, 1.0, 2.0**24), (2.0**-14, np.inf, 2.0**-14)):
        scaler = LossScaler(first, interval=1)
        set_gradient(parameter, [gradient])
        scaler.step(optim.SGD([parameter], 0.0))
        assert scaler.state_dict()["scale"] == last


def test_a_loss_of_16_bits_is_scaled_in_float32():
    """In float16 it would be infinite."""
    scaled = optim.LossScaler(2.0**15).scale(ns.Tensor(np.float16(100).reshape(1)))
    assert (scaled.dtype, scaled.item()) == (np.float32, 100 * 2.0**15)


def test_norm_of_no_gradients():
    assert clip_grad_norm([nn.Parameter(np.ones(2))], 1.0).item() == 0


def test_block_sparse_and_dense_gradients_have_one_norm(rng, put):
    sparse = nn.Parameter(put(ns.BlockSparse(np.zeros((2, 4, 4), np.float32), [[1, 0], [0, 1]])))
    dense = nn.Parameter(put(np.zeros(3, np.float32)))
    blocks, vector = rng.standard_normal((2, 4, 4)), rng.standard_normal(3)
    sparse.grad = ns.Tensor(put(ns.BlockSparse(blocks.astype(np.float32), [[1, 0], [0, 1]])))
    dense.grad = ns.Tensor(put(vector.astype(np.float32)))
    expected = np.sqrt((blocks**2).sum() + (vector**2).sum())
    assert clip_grad_norm([sparse, dense], 1.0).item() == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(host(sparse.grad.values), blocks / expected, rtol=1e-5)
    np.testing.assert_allclose(host(dense.grad.data), vector / expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda p: LossScaler(0.0), "scale takes a number from"),
        (lambda p: LossScaler(float("nan")), "scale takes a number from"),
        (lambda p: LossScaler(interval=0), "interval takes an integer of at least 1"),
        (
            lambda p: LossScaler().load_state_dict({"scale": 0.0, "good_steps": 0}),
            "scale.* takes a number from",
        ),
        (
            lambda p: LossScaler().load_state_dict({"scale": 1.0, "good_steps": -1}),
            "good_steps.* takes an integer of at least 0",
        ),
        (lambda p: LossScaler().step(optim.SGD([p], 0.1)), "call backward before"),
        (lambda p: LossScaler().load_state_dict({"scale": 1.0}), "state takes scale, good"),
        (lambda p: clip_grad_norm([p], 0.0), "max_norm takes a number above 0"),
        (
            lambda p: optim.Adam([p]).load_state_dict(
                optim.Adam([p]).state_dict() | {"0.m": np.ones(3, np.float32)}
            ),
            "state lacks '0.v'",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses(call, says):
    with pytest.raises(ValueError, match=says):
        call(nn.Parameter(np.ones(3, np.float32)))


def test_other_things_than_optimizers_are_refused():
    with pytest.raises(TypeError, match="optimizers takes Optimizers, got int"):
        LossScaler().step(3)


@needs_a_gpu
def test_a_checkpoint_without_masters_is_refused():
    parameter = parameter_of(np.ones(3), "float16")
    state = optim.SGD([parameter], 0.1, momentum=0.9).state_dict()
    state["0.velocity"] = np.ones(3, np.float32)
    with pytest.raises(ValueError, match=r"state lacks '0\.master'"):
        optim.SGD([parameter], 0.1, momentum=0.9).load_state_dict(state)
    state["0.velocity"] = np.ones(3, np.float16)
    with pytest.raises(ValueError, match=r"takes \(3,\) of float32, got \(3,\) of float16"):
        optim.SGD([parameter], 0.1, momentum=0.9).load_state_dict(state)


@needs_a_gpu
def test_a_mean_of_many_float16_values_is_finite():
    x = ns.Tensor(ns.to_device(np.full(100, 1000, np.float16)), requires_grad=True)
    mean = x.mean()
    mean.backward()
    assert host(mean.data) == 1000
    np.testing.assert_allclose(host(x.grad.data), 0.01, rtol=1e-3)


def test_a_gradient_that_two_parameters_share_is_clipped_once(put):
    a, b = (nn.Parameter(put(np.zeros(2, np.float32))) for _ in range(2))
    (a + b).backward(put(np.float32([3, 4])))
    assert clip_grad_norm([a, b], 1.0).item() == pytest.approx(50**0.5)
    for parameter in (a, b):
        np.testing.assert_allclose(host(parameter.grad.data), np.float32([3, 4]) / 50**0.5)
