"""What the tape holds was changed before `backward`: refused where a gradient would be made of it.

And only there: a sum needs none of its operands.
"""

from contextlib import nullcontext

import numpy as np
import pytest
from conftest import host
from drawn import draws
from hypothesis import given
from hypothesis import strategies as st

import numbsparse as ns
from numbsparse import device, nn, ops
from numbsparse.nn import functional as F
from numbsparse.nn import optim

LAYOUT = ns.Layout([[1, 1], [0, 1]])


def sparse(rng):
    return ns.BlockSparse(rng.standard_normal((3, 4, 4)).astype(np.float32), LAYOUT)


def array(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


# What is computed of p, a Parameter, and x, a Tensor that requires a gradient; its operands.
DENSE = {
    "multiply": (lambda p, x: x * p, "px"),
    "divide": (lambda p, x: x / p, "p"),
    "power": (lambda p, x: p**3 + x, "p"),
    "log": (lambda p, x: F.log(p * p + 1.0) + x, "p"),
    "relu": (lambda p, x: F.relu(p) + F.elu(x), "px"),
    "gelu": (lambda p, x: F.gelu(p) + F.softplus(x), "px"),
    "view": (lambda p, x: F.reshape(p, (2, 12)).T * F.reshape(x, (12, 2)), "px"),
    "rows": (lambda p, x: p[1:] * x[:2], "px"),
    "parts": (lambda p, x: F.unbind(p)[0] * F.unbind(x)[1], "px"),
    "recompute": (lambda p, x: nn.recompute(lambda x: F.tanh(x * p), x), "px"),
    "mse": (lambda p, x: F.mse_loss(p, x) * p, "p"),
    "norm": (lambda p, x: F.layer_norm(x, p[0], p[1]), "p"),
    "add": (lambda p, x: p + x, ""),
    "sum": (lambda p, x: p.sum() - x.mean(), ""),
    "exp": (lambda p, x: F.exp(p) + F.tanh(x), ""),
    "concatenate": (lambda p, x: F.concatenate([p, -x]), ""),
}
SPARSE = {
    "x @ w": (lambda p, x: x @ p, "px"),
    "w @ x": (lambda p, x: p @ x.T, "px"),
    "x @ w.T": (lambda p, x: x @ p.T, "px"),
    "sddmm": (lambda p, x: ns.sddmm(x.T, x, p.data) + p, "x"),
    "scale": (lambda p, x: p * 2.0 @ x.T, "x"),
    "weight norm": (lambda p, x: x @ F.normalise_columns(p, ns.Tensor(x.data[0])), "px"),
    "loop": (lambda p, x: twice(F.repeated_product(p), x), "px"),
}


def twice(function, x):
    return function(F.tanh(function(x)))


def made(rng, put, is_sparse):
    data = sparse(rng) if is_sparse else array(rng, 3, 8)
    return nn.Parameter(put(data)), ns.Tensor(put(array(rng, 3, 8)), requires_grad=True)


def step_of(optimizer):
    def step(p):
        ones = ops.full(p.values.shape, 1.0, p.dtype, p.place)
        p.grad = ns.Tensor(p.data.with_values(ones) if p.ndim and hasattr(p.data, "nnz") else ones)
        optimizer([p]).step()
        p.grad = None

    return step


def applied(p):
    average = optim.ExponentialMovingAverage([p])
    average.step()
    with average.applied():
        pass


CHANGES = {
    "SGD": (step_of(lambda ps: optim.SGD(ps, 0.1)), r"SGD\.step"),
    "AdamW": (step_of(lambda ps: optim.AdamW(ps, 0.1)), r"AdamW\.step"),
    "data": (lambda p: setattr(p, "data", copied(p.data)), r"an assignment to \.data"),
    "same data": (lambda p: setattr(p, "data", p.data), r"an assignment to \.data"),
    "average": (applied, r"ExponentialMovingAverage\.applied"),
    "copy_into": (lambda p: ops.copy_into(p.values, ops.copy(p.values)), "copy_into"),
    "NumPy": (lambda p: np.negative(p.values, out=p.values), "a write to its array"),
    "one value": (lambda p: p.values.reshape(-1).__setitem__(5, 9), "a write to its array"),
}
ON_CPU = ["NumPy", "one value"]


def copied(data):
    return data.copy() if isinstance(data, ns.BlockSparse) else ops.copy(data)


ONCE = ["relu"]  # whose gradient's gradient is zero
CASES = [
    (name, change, of)
    for name in (*DENSE, *SPARSE)
    for change in (CHANGES if name in ("multiply", "x @ w") else ("SGD", "NumPy"))
    for of in "px"
]


@pytest.mark.pairs
@pytest.mark.parametrize(("name", "change", "of"), CASES, ids=map(" - ".join, CASES))
def test_a_change_before_backward_is_refused_where_it_matters(rng, put, place, name, change, of):
    if place == "cuda" and change in ON_CPU:
        pytest.skip("NumPy writes on the CPU")
    function, needed = (SPARSE | DENSE)[name]
    p, x = made(rng, put, name in SPARSE)
    y, again = function(p, x), function(p, x)
    dy = ns.Tensor(y.data.with_values(y.values) if hasattr(y.data, "nnz") else y.data)
    right = ns.grad(y, [p, x], grad_output=dy)
    changed = p if of == "p" else x
    alter, by = CHANGES[change]
    alter(changed)
    if of in needed:
        with pytest.raises(RuntimeError, match=f"was changed by {by}.*run the forward pass again"):
            ns.grad(again, [p, x], grad_output=dy)
        with pytest.raises(RuntimeError, match=by):
            ns.grad(y, [p, x], grad_output=dy, create_graph=name not in ONCE)
        return
    for got, expected in zip(ns.grad(again, [p, x], grad_output=dy), right, strict=True):
        if expected is not None:
            np.testing.assert_array_equal(host(got.data), host(expected.data))


RESULTS = {
    name: getattr(F, name)
    for name in ("relu", "elu", "glu", "gelu", "tanh", "sigmoid", "softmax", "log_softmax")
} | {
    "exp": F.exp,
    "logsumexp": F.logsumexp,
    "sqrt": lambda x: F.sqrt(x * x + 1.0),
    "l1": lambda w: F.block_norms(w, "l1"),
    "l2": lambda w: F.block_norms(w, "l2"),
    "max": lambda w: F.block_norms(w, "max"),
    "columns": F.column_norms,
}


WITHOUT = ("relu", "l1")  # a result that nothing of is needed


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_that_is_changed_changes_no_gradient(rng, name):
    """It is refused, or nothing of it is needed."""
    data = sparse(rng) if name in ("l1", "l2", "max", "columns") else array(rng, 3, 8)
    p = nn.Parameter(data)
    y, again = RESULTS[name](p), RESULTS[name](p)
    (right,) = ns.grad(y, [p], grad_output=np.ones(y.shape, np.float32))
    np.negative(again.data, out=again.data)
    with nullcontext() if name in WITHOUT else pytest.raises(RuntimeError, match="by a write to"):
        (got,) = ns.grad(again, [p], grad_output=np.ones(y.shape, np.float32))
        np.testing.assert_array_equal(got.values, right.values)


def test_the_operand_is_named(rng):
    p, x = made(rng, lambda a: a, True)
    y = x @ p
    x.data[0] = 0
    says = r"x of dense times sparse, a Tensor of shape \(3, 8\), float32, was changed by a write"
    with pytest.raises(RuntimeError, match=says):
        y.sum().backward()


def test_results_that_were_changed_are_refused(rng, put, place):
    p, _ = made(rng, put, False)
    for function in (F.exp, F.tanh, F.sigmoid, F.softmax, F.layer_norm):
        y = function(p)
        ops.copy_into(y.data, ops.zeros_like(y.data))
        with pytest.raises(RuntimeError, match="was changed by copy_into"):
            y.sum().backward()
    if place == "cpu":
        y = F.exp(p)
        y.data[1, 2] = 0
        with pytest.raises(RuntimeError, match="result, of exp"):
            y.sum().backward()


@pytest.mark.parametrize("what", ["targets", "indices"])
def test_integers_are_operands_too(rng, what):
    p = nn.Parameter(array(rng, 5, 5))
    numbers = np.array([1, 0, 4, 2, 2])
    y = F.cross_entropy(p, numbers) if what == "targets" else F.embedding(p, numbers).sum()
    numbers[2] = 1
    with pytest.raises(RuntimeError, match="was changed by a write to its array"):
        y.backward()


def test_arrays_beside_tensors_are_operands_too(rng, put, place):
    x, w = put(array(rng, 3, 8)), put(sparse(rng))
    p, q = nn.Parameter(w.copy()), nn.Parameter(ops.copy(x))
    for y, memory in ((x @ p, x), (q * x, x), (q @ w, w.values)):
        ops.copy_into(memory, ops.copy(memory))
        with pytest.raises(RuntimeError, match="was changed by copy_into"):
            y.sum().backward()
    y = x @ p
    ns.matmul(put(array(rng, 3, 8)), w, out=x)
    with pytest.raises(RuntimeError, match="was changed by matmul with it as out"):
        y.sum().backward()


def test_the_scale_of_a_loss(put, place):
    p = nn.Parameter(put(np.ones(3, np.float32)))
    scaler, optimizer = optim.LossScaler(8.0, interval=1), optim.SGD([p], 0.1)
    first, second = (scaler.scale((p + 1.0).sum()) for _ in range(2))
    first.backward()
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"was changed by LossScaler\.step"):
        second.backward()


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "layer norm"])
def test_lstm(rng, put, place, norm):
    if norm and place == "cuda":
        pytest.skip("the same way back as without")
    lstm = nn.LSTM(5, 6, block_size=4, layer_norm=norm, seed=0).to(place)
    x = ns.Tensor(put(array(rng, 3, 2, 5)), requires_grad=True)
    for changed in (x, *lstm.parameters())[: 2 if place == "cuda" else None]:
        y, _ = lstm(x)
        before = ops.copy(changed.values)
        ops.copy_into(changed.values, before)
        with pytest.raises(RuntimeError, match=r"of LSTM, .* was changed by copy_into"):
            y.sum().backward()
    y, _ = lstm(x)
    ops.copy_into(y.data, ops.copy(y.data))
    with pytest.raises(RuntimeError, match="was changed by copy_into"):
        y.sum().backward()


def test_convolution(rng, put, place):
    conv = nn.Conv2d(4, 4, 3, block_size=4, seed=0).to(place)
    for of in ("x", "weight"):
        x = ns.Tensor(put(array(rng, 1, 4, 4, 4)), requires_grad=True)
        y = conv(x)
        memory = (x if of == "x" else conv.weight).values
        ops.copy_into(memory, ops.copy(memory))
        with pytest.raises(RuntimeError, match=r"of conv, .* was changed by copy_into"):
            y.sum().backward()


def test_what_came_after_is_free_to_change(rng, put):
    """A training: gradients, seeds and weights are written between a backward and the next."""
    p, x = made(rng, put, True)
    optimizer, seed = optim.Adam([p], 0.1), put(array(rng, 3, 8))
    given = ns.Tensor(seed)
    for _ in range(2):
        y = x.detach() @ p
        ops.copy_into(seed, ops.copy(seed))  # after the forward pass, which did not see it
        y.backward(given)
        optimizer.step()
        optimizer.zero_grad()
    first = F.tanh(x @ p).sum()
    ns.grad(first, [p])
    ops.copy_into(p.values, ops.copy(p.values))
    F.tanh(x @ p).sum().backward()


def with_mask(x, h, c, kept):
    layer = LSTM.layers[0]
    return F.lstm(x, layer.weight_ih, layer.weight_hh, layer.bias, h, c, kept=kept)


def steps(x, h, c):
    y, state = STEPS(x, (h, c))
    return y, *state


LSTM = nn.LSTM(8, 8, block_size=4, dtype="float64", seed=0)
STEPS = nn.MultiplicativeLSTM(8, 8, block_size=4, internal_steps=2, dtype="float64", seed=0)
SHAPES = {"x": (4, 2, 8), "g": (8,), "b": (8,), "h": (2, 8), "c": (2, 8), "kept": (4, 2, 8)}
# What is computed of such arrays: several results, or one.
WHOLE = {
    "norm": lambda x, g, b, h, c, kept: F.repeated_norm(g, b)(x[0]),
    "norm, relu": lambda x, g, b, h, c, kept: F.repeated_norm(g, b)(x[0], "relu"),
    "norm, times": lambda x, g, b, h, c, kept: F.repeated_norm(g, b)(x[0], "times", h),
    "norm, plus": lambda x, g, b, h, c, kept: F.repeated_norm(g, b)(x[0], "plus_relu", h),
    "cell": lambda x, g, b, h, c, kept: F.repeated_cell()(F.transpose(x, (1, 0, 2)), c, kept[0]),
    "lstm": lambda x, g, b, h, c, kept: with_mask(x, h, c, kept),
    "steps": lambda x, g, b, h, c, kept: steps(x, h, c),
    "again": lambda x, g, b, h, c, kept: nn.recompute(lambda x, k: F.tanh(x * k), x, kept),
}


@draws(150, "written before backward")
@given(
    seed=st.integers(0, 2**20),
    name=st.sampled_from(sorted(WHOLE)),
    trained=st.sets(st.sampled_from("gbhc")),
    changed=st.sampled_from([*SHAPES, 0, 1, 2]),
    again=st.booleans(),
)
def test_a_write_before_backward_is_refused_or_changes_nothing(seed, name, trained, changed, again):
    """To an array, to a Tensor that is trained or not, or to a result."""
    rng = np.random.default_rng(seed)
    values = {one: rng.standard_normal(shape) for one, shape in SHAPES.items()}

    def computed():
        tensors = {
            one: ns.Tensor(value.copy(), requires_grad=one in {"x", *trained})
            for one, value in values.items()
        }
        kept = tensors["kept"].numpy()
        results = WHOLE[name](**tensors | {"kept": kept})
        results = results if isinstance(results, tuple) else (results,)
        leaves = [tensor for tensor in tensors.values() if tensor.requires_grad]
        return tensors, results, leaves, sum(F.sum(y) for y in results)

    _, _, leaves, loss = computed()
    right = ns.grad(loss, leaves, create_graph=again)
    tensors, results, leaves, loss = computed()
    memory = tensors[changed] if isinstance(changed, str) else results[changed % len(results)]
    np.multiply(memory.data, 3.0, out=memory.data)
    try:
        found = ns.grad(loss, leaves, create_graph=again)
    except RuntimeError as error:
        assert "was changed by a write to its array" in str(error)  # noqa: PT017
        return
    for got, expected in zip(found, right, strict=True):
        if expected is not None:
            np.testing.assert_array_equal(got.numpy(), expected.numpy())


def test_an_edit_of_memory_that_another_had(rng):
    """A new array at the place of an old one was never edited."""
    for _ in range(100):
        a = np.ones(8, np.float32)
        ns.edits.note(a, "a test")
        del a
        b = np.ones(8, np.float32)
        assert ns.edits.last_of(b) is None


def test_fingerprints_see_writes_of_many_values(rng):
    for shape in ((1000,), (64, 64), (7, 300, 5), (2, 3, 4, 50)):
        for form in ("C", "F", "slices"):
            a = array(rng, *shape)
            a = a if form == "C" else np.asfortranarray(a) if form == "F" else a[..., ::2]
            before = ns.edits.fingerprint(a)
            a *= np.float32(1.5)
            assert before != ns.edits.fingerprint(a)


def test_a_replay_counts_as_the_steps_that_it_is(rng):
    """A captured step that ran between forward and backward."""
    if not device.is_available():
        pytest.skip(device.why_unavailable())
    p = nn.Parameter(ns.to_device(array(rng, 3, 8)))
    optimizer = optim.SGD([p], 0.1)

    @ns.graph
    def step(x):
        p.grad = None
        (p * x).sum().backward()
        optimizer.step()

    x = array(rng, 3, 8)
    for _ in range(4):
        y = (p * p).sum()
        step(x)
        with pytest.raises(RuntimeError, match=r"was changed by SGD\.step"):
            y.backward()


def test_clipping_leaves_the_arrays_that_were_there(rng, put):
    """One given to `backward`, and one that two weights see in two shapes."""
    p, q = nn.Parameter(put(array(rng, 2, 3))), nn.Parameter(put(array(rng, 6)))
    g = put(100 * array(rng, 2, 3))
    before = host(g).copy()
    (p + F.reshape(q, (2, 3))).backward(g)
    norm = nn.utils.clip_grad_norm([p, q], 1.0)
    np.testing.assert_array_equal(host(g), before)
    wanted = before / np.sqrt(2 * (before.astype(float) ** 2).sum())
    np.testing.assert_allclose(norm.item(), np.sqrt(2) * np.linalg.norm(before), rtol=1e-6)
    np.testing.assert_allclose(host(p.grad.data), wanted, rtol=1e-5)
    np.testing.assert_allclose(host(q.grad.data), wanted.reshape(-1), rtol=1e-5)
    w = nn.Parameter(put(sparse(rng)))
    g = put(sparse(rng))
    before = host(g)
    w.backward(g)
    nn.utils.clip_grad_norm([w], 1e-3)
    np.testing.assert_array_equal(host(g), before)
    assert np.linalg.norm(host(w.grad.data)) < 1.001e-3
