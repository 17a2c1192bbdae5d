"""Steps in place, against the formulas in float64; norms and scaling."""

import numpy as np
import pytest
from conftest import needs_bfloat16
from ops_helpers import HOMES, Home, assert_close, in_all_forms, in_all_homes, on_both_places

from numbsparse import device, ops

on_cpu = pytest.mark.parametrize("home", HOMES[:2], ids=str)
# bfloat16 takes a master: without one its weights would not move.
in_homes_without_a_master = pytest.mark.parametrize(
    "home", [home for home in HOMES if home.dtype != "bfloat16"], ids=str
)


def sgd_step(p, g, velocity, lr, momentum=0.0, decay=0.0, nesterov=False, master=None):
    numbers = beside(p, np.array([lr, momentum, decay, *ops.TAKEN]))
    ops.sgd_step(p, g, velocity, master, numbers, nesterov)


def adam_step(p, g, m, v, *how, master=None):
    ops.adam_step(p, g, m, v, master, beside(p, ops.adam_numbers(*how)))


def beside(p, numbers):
    return numbers if isinstance(p, np.ndarray) else device.to_device(numbers.astype(np.float32))


@in_homes_without_a_master
@in_all_forms
@pytest.mark.parametrize(
    ("momentum", "weight_decay", "nesterov"),
    [(None, 0.0, False), (None, 0.1, False), (0.9, 0.1, False), (0.9, 0.0, True)],
    ids=["plain", "decay", "momentum", "nesterov"],
)
def test_sgd_step(home, form, momentum, weight_decay, nesterov, rng):
    p, g, v = (rng.standard_normal((3, 5)) for _ in range(3))
    there, velocity = home.send(p), None if momentum is None else home.send(v)
    momentum = momentum or 0.0
    sgd_step(there, home.send(g, form=form), velocity, 0.1, momentum, weight_decay, nesterov)
    p, g, v = map(home.rounded, (p, g, v))
    slope = g + weight_decay * p
    speed = momentum * v + slope
    if velocity is None:
        speed = slope
    else:
        assert_close(home, home.fetch(velocity), speed, magnitude=10.0)
    step = slope + momentum * speed if nesterov else speed
    # A float16 velocity is rounded once more than the step that is made of it.
    assert_close(home, home.fetch(there), p - 0.1 * step, magnitude=10.0)


@in_homes_without_a_master
@in_all_forms
@pytest.mark.parametrize("decoupled", [False, True], ids=["adam", "adamw"])
@pytest.mark.parametrize("step", [1, 10])
def test_adam_step(home, form, decoupled, step, rng):
    p, g, m = (rng.standard_normal((3, 5)) for _ in range(3))
    v = rng.uniform(0.1, 1, (3, 5))
    there, first, second = (home.send(a) for a in (p, m, v))
    lr, beta1, beta2, eps, decay = 0.01, 0.9, 0.999, 1e-8, 0.1
    adam_step(
        there, home.send(g, form=form), first, second, lr, beta1, beta2, eps, decay, decoupled, step
    )
    p, g, m, v = map(home.rounded, (p, g, m, v))
    slope = g if decoupled else g + decay * p
    m = beta1 * m + (1 - beta1) * slope
    v = beta2 * v + (1 - beta2) * slope**2
    p = p * (1 - lr * decay) if decoupled else p
    p = p - lr * m / (1 - beta1**step) / (np.sqrt(v / (1 - beta2**step)) + eps)
    assert_close(home, home.fetch(first), m, magnitude=4.0)
    assert_close(home, home.fetch(second), v, magnitude=4.0)
    assert_close(home, home.fetch(there), p, steps=16, magnitude=4.0)


@pytest.mark.simulator
def test_float16_with_state_in_float32(rng):
    home = Home("cuda", "float16")
    p, g = home.send(np.ones(5)), home.send(np.full(5, 1e-4))
    m, v = (home.send(np.zeros(5), dtype="float32") for _ in range(2))
    adam_step(p, g, m, v, 0.1, 0.9, 0.999, 1e-8, 0.0, False, 1)
    # The squares, 1e-11, would be 0 in float16 and the step enormous.
    assert home.fetch(v, dtype="float32") == pytest.approx(1e-11, rel=2e-3)
    assert home.fetch(p) == pytest.approx(0.9, rel=2e-3)


@on_both_places
def test_no_weights(home):
    p, g, m, v = (home.send(np.ones((0, 3))) for _ in range(4))
    sgd_step(p, g, m, 0.1, 0.9)
    adam_step(p, g, m, v, 0.1, 0.9, 0.999, 1e-8, 0.0, False, 1)


@in_all_homes
@in_all_forms
def test_global_norm(home, form, rng):
    arrays = [rng.standard_normal(shape) for shape in ((3, 5), (), (40,), (0, 2), (2, 1, 3))]
    norm = ops.global_norm([home.send(a, form=form) for a in arrays])
    assert norm.shape == ()
    flat = np.concatenate([home.rounded(a).reshape(-1) for a in arrays])
    got = home.fetch(norm, dtype=home.compute_dtype)
    np.testing.assert_allclose(got, np.sqrt(flat @ flat), rtol=flat.size * home.sum_eps)


@on_both_places
def test_norm_of_many_values(home, rng):
    a = rng.standard_normal(700)  # more than one part
    got = home.fetch(ops.global_norm([home.send(a), home.send(a)]))
    expected = np.sqrt(2) * np.linalg.norm(home.rounded(a))
    np.testing.assert_allclose(got, expected, rtol=700 * home.sum_eps)


@pytest.mark.parametrize("home", HOMES[:3], ids=str)
def test_a_norm_whose_square_is_too_large_or_too_small(home, rng):
    """Gradients that explode are clipped, too."""
    most = np.finfo(np.float32).max if home.dtype == "float32" else 1e150
    for size in (most / 50, most**0.75, most**0.5, most**-0.5, most**-0.7):
        arrays = [size * rng.uniform(-1, 1, shape) for shape in ((3, 5), (4,))]
        right = np.linalg.norm(np.concatenate([a.reshape(-1) for a in arrays]))
        norm, scaled = ops.scale_to_norm([home.send(a) for a in arrays], size / 1e4)
        np.testing.assert_allclose(home.fetch(norm), right, rtol=1e-6)
        np.testing.assert_allclose(home.fetch(ops.global_norm(scaled)), size / 1e4, rtol=1e-6)


@on_cpu
def test_a_norm_that_is_too_large(home):
    norm = ops.global_norm([np.full(4, np.finfo(home.dtype).max, home.dtype)])
    assert (norm, norm.dtype) == (np.inf, home.dtype)


@in_all_homes
@in_all_forms
@pytest.mark.parametrize("share", [0.5, 2.0], ids=["above", "below"])
def test_scale_to_norm(home, form, share, rng):
    arrays = [rng.standard_normal((3, 5)), rng.standard_normal((4,))]
    sent = [home.send(a, form=form) for a in arrays]
    flat = np.concatenate([home.rounded(a).reshape(-1) for a in arrays])
    before = np.linalg.norm(flat)
    norm, results = ops.scale_to_norm(sent, share * before)
    got = home.fetch(norm, dtype=home.compute_dtype)
    np.testing.assert_allclose(got, before, rtol=flat.size * home.sum_eps)
    for a, given, scaled in zip(arrays, sent, results, strict=True):
        expected = home.rounded(a) * min(1.0, share)
        assert_close(home, home.fetch(ops.copy(scaled)), expected, steps=2 * flat.size)
        np.testing.assert_array_equal(home.fetch(ops.copy(given)), home.rounded(a))


@on_both_places
def test_scale_of_zeros_and_of_what_is_not_finite(home):
    zeros = home.send(np.zeros(3))
    norm, (scaled,) = ops.scale_to_norm([zeros], 1.0)
    assert home.fetch(norm) == 0
    np.testing.assert_array_equal(home.fetch(scaled), 0)
    for bad in (np.nan, np.inf):
        norm, (scaled,) = ops.scale_to_norm([home.send([bad, 100])], 1.0)
        np.testing.assert_array_equal(home.fetch(norm), bad)
        np.testing.assert_array_equal(home.fetch(scaled), [bad, 100])


@on_both_places
def test_arrays_that_bear_a_scale(home):
    array, scale = home.send([300, 400]), home.send(np.float32(100))
    norm, (scaled,) = ops.scale_to_norm([array], 2.5, scale)
    assert home.fetch(norm) == 5
    np.testing.assert_allclose(home.fetch(scaled), [150, 200], rtol=1e-6)


@on_both_places
def test_refusals(home):
    p, g, v = (home.send(np.ones((2, 3))) for _ in range(3))
    other = home.send(np.ones((3, 2)))
    other_dtype = home.send(np.ones((2, 3)), dtype="float64" if home.place == "cpu" else "float16")
    adam = (0.1, 0.9, 0.999, 1e-8, 0.0, False)
    with pytest.raises(ValueError, match="p and g take one shape"):
        sgd_step(p, other, None, 0.1)
    with pytest.raises(TypeError, match="p and g take one dtype"):
        sgd_step(p, other_dtype, None, 0.1)
    with pytest.raises(ValueError, match=r"velocity takes the device and shape \(2, 3\) of p"):
        sgd_step(p, g, other, 0.1, 0.9)
    with pytest.raises(TypeError, match="velocity takes the dtype of p"):
        sgd_step(p, g, other_dtype, 0.1, 0.9)
    with pytest.raises(ValueError, match="p takes a C-contiguous array, got"):
        sgd_step(other.T, g, None, 0.1)
    with pytest.raises(ValueError, match="v takes a C-contiguous array, got"):
        adam_step(p, g, v, other.T, *adam, 1)
    with pytest.raises(ValueError, match="step takes an integer of at least 1, got 0"):
        adam_step(p, g, v, v, *adam, 0)
    with pytest.raises(ValueError, match="arrays takes at least one array"):
        ops.global_norm([])
    with pytest.raises(TypeError, match=f"master takes None with a p of {home.dtype}"):
        sgd_step(p, g, None, 0.1, master=v)
    if home.place == "cpu":
        with pytest.raises(TypeError, match=r"arrays\[0\] and arrays\[1\] take one dtype"):
            ops.global_norm([p, other_dtype])
    else:
        assert home.fetch(ops.global_norm([p, other_dtype])) == pytest.approx(np.sqrt(12))
        with pytest.raises(TypeError, match="master takes float32 with a p of float16"):
            sgd_step(other_dtype, other_dtype, None, 0.1, master=other_dtype)
        with pytest.raises(ValueError, match=r"master takes the device and shape \(2, 3\) of p"):
            sgd_step(other_dtype, other_dtype, None, 0.1, master=other)
    for max_norm in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="max_norm takes a number above 0"):
            ops.scale_to_norm([p], max_norm)


def test_two_places_are_refused():
    there, here = HOMES[2].send(np.ones(3)), np.ones(3, np.float32)
    with pytest.raises(ValueError, match="p and g take one device"):
        sgd_step(there, here, None, 0.1)
    with pytest.raises(ValueError, match="velocity takes the device and shape"):
        sgd_step(there, there, here, 0.1, 0.9)
    with pytest.raises(ValueError, match="take one device"):
        ops.global_norm([there, here])


@needs_bfloat16
def test_bfloat16_takes_a_master_and_float32_state():
    home = Home("cuda", "bfloat16")
    p, g, m, v = (home.send(np.ones(3)) for _ in range(4))
    master = home.send(np.zeros(3), "float32")
    adam = (0.1, 0.9, 0.999, 1e-8, 0.0, False, 1)
    with pytest.raises(TypeError, match="master takes a float32 array with a p of bfloat16"):
        sgd_step(p, g, None, 0.1)
    with pytest.raises(TypeError, match="m takes float32 with a p of bfloat16, got bfloat16"):
        adam_step(p, g, m, v, *adam, master=master)


@pytest.mark.simulator
def test_more_values_than_threads(monkeypatch, rng):
    from numbsparse.kernels import optimizer as kernels

    monkeypatch.setattr(kernels, "MOST_BLOCKS", 1)
    home, a = HOMES[2], rng.standard_normal(1000)
    array, norm = home.send(a), np.linalg.norm(a)
    got, (scaled,) = ops.scale_to_norm([array], 1.0)
    np.testing.assert_allclose(home.fetch(got), norm, rtol=1e-6)
    np.testing.assert_allclose(home.fetch(scaled), a / norm, rtol=1e-5)
