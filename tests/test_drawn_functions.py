"""Every function of arrays, drawn: dtypes, shapes and orders of memory, against NumPy in float64.

Products, convolutions, LSTMs and optimizers, whose operands are more than arrays, have tests of
their own.
"""

import numpy as np
import pytest
from drawn import draws
from drawn_functions import BOTH, OF_ARRAYS, OF_TENSORS
from drawn_helpers import FORMS, forms, laid, seeds, shapes, values
from hypothesis import given
from hypothesis import strategies as st
from ops_helpers import HOMES

import numbsparse as ns
from numbsparse import device, ops
from numbsparse.dtypes import as_dtype, finfo
from numbsparse.nn import functional as F
from numbsparse.testing import check_grads

TABLE = [(ops, m) for m in BOTH + OF_ARRAYS] + [(F, m) for m in BOTH + OF_TENSORS]
IDS = [f"{room.__name__.rpartition('.')[2]}.{m.name}" for room, m in TABLE]
ORDERS = {"cpu": list(FORMS), "cuda": [form for form in FORMS if FORMS[form][1]]}


@pytest.mark.parametrize("home", HOMES, ids=str)
@pytest.mark.parametrize(("room", "meaning"), TABLE, ids=IDS)
def test_values(room, meaning, home):
    """Each order of memory of the first array in each place, in turns of dtypes; the rest drawn."""
    orders = ORDERS[home.place]
    if home.place == "cuda" and not device.is_available():
        pytest.skip(device.why_unavailable())
    if home.place == "cpu" or device.SIMULATED:
        turns = 3 if home.place == "cuda" or (room is F and meaning in BOTH) else 2
        orders = orders[HOMES.index(home) % turns :: turns]

    @draws(2, "values", room.__name__, meaning.name, str(home))
    @given(st.data(), seeds)
    def drawn(data, seed):
        for number, first in enumerate(orders):
            arrays, others = meaning.inputs(data.draw, np.random.default_rng([seed, number]))
            if home.place == "cuda" and "dtype" in others:
                others["dtype"] = "float16"  # a GPU has no float64
            own = [first, *(data.draw(forms) for _ in arrays[1:])]
            compare(room, meaning, home, arrays, own, others)

    drawn()


def compare(room, meaning, home, arrays, orders, others):
    """One call, which changes nothing that it was given."""
    dtypes = [as_dtype(home.compute_dtype if i in meaning.wide else home.dtype)
              for i in (*range(len(arrays)), -1)]  # fmt: skip
    there = [laid(form, a, dtype, home.place)
             for a, form, dtype in zip(arrays, orders, dtypes, strict=False)]  # fmt: skip
    rounded = [values(a) for a in there]
    tensors = room is F
    beside = {k: beside_of(v, home.place) for k, v in others.items()}
    got = meaning.call(getattr(room, meaning.name), [ns.Tensor(a) for a in there] if tensors
                       else there, beside)  # fmt: skip
    expected = meaning.meaning(*rounded, **others)
    sizes = expected if meaning.terms is None else meaning.terms(*rounded, **others)
    steps = meaning.steps(rounded[0]) if callable(meaning.steps) else meaning.steps
    if not isinstance(expected, list):
        got, expected, sizes = [got], [expected], [sizes]
    for result, right, size in zip(got, expected, sizes, strict=True):
        result = result.data if tensors else result
        assert isinstance(result, device.DeviceArray if home.place == "cuda" else np.ndarray)
        assert result.dtype == as_dtype(others.get("dtype", dtypes[-1]))
        assert result.shape == np.shape(right)
        if not (meaning.view or tensors):
            check_new(result, there)
        near(values(result), right, home, steps, size, result.dtype, roundings=meaning.roundings)
    for before, after in zip(rounded, there, strict=True):
        np.testing.assert_array_equal(values(after), before)


def beside_of(other, place):
    return ns.to_device(other) if isinstance(other, np.ndarray) and place == "cuda" else other


def check_new(result, arrays):
    """A C-contiguous array; on the CPU with memory of its own."""
    if isinstance(result, np.ndarray):
        assert result.flags.c_contiguous
        assert not any(np.may_share_memory(result, a) for a in arrays if a.size)
    else:
        assert result.is_contiguous


def near(got, expected, home, steps, terms, dtype, below=0.0, roundings=1):
    """Within so many roundings of numbers of the size of the terms, and one of the result.

    What is `below` in size may be lost.
    """
    info = finfo(dtype)
    expected = np.asarray(expected, float)
    with np.errstate(over="ignore"):  # beyond the dtype's range it is infinite
        expected = np.where(np.isinf(expected.astype(dtype).astype(float)),
                            np.copysign(np.inf, expected), expected)  # fmt: skip
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(got[~finite], expected[~finite])
    right, size = expected[finite], np.broadcast_to(abs(terms), expected.shape)[finite]
    rounded = abs(right) if roundings == 1 else roundings * size
    bound = steps * home.sum_eps * size + float(info.eps) / 2 * rounded
    bound += float(info.smallest_subnormal) + below
    error = abs(got[finite] - right)
    assert np.all(error <= bound), f"off by {np.max(error / bound):.2f} times the bound"


@pytest.mark.parametrize("meaning", [m for m in BOTH + OF_TENSORS if m.order], ids=lambda m: m.name)
def test_gradients(meaning):
    function = getattr(F, meaning.name)

    @draws(6, "gradients", meaning.name)
    @given(st.data(), seeds, st.integers(1, meaning.order))
    def drawn(data, seed, order):
        arrays, others = meaning.inputs(data.draw, np.random.default_rng(seed))
        # Equal values are a corner of layer_norm.
        orders = [data.draw(forms.filter(lambda form: form != "repeated")) for _ in arrays]
        arrays = [laid(*pair, np.float64, "cpu") for pair in zip(orders, arrays, strict=True)]

        def call(*tensors):
            result = meaning.call(function, list(tensors), others)
            if not isinstance(result, list):
                return result
            parts = [F.reshape(part * (i + 1.0), (-1,)) for i, part in enumerate(result)]
            return F.concatenate(parts) if parts else tensors[0]

        check_grads(call, *arrays, order=order, seed=seed)

    drawn()


FAR = [0, 1e-30, 1e-8, 1e-3, 1, 5, 20, 60, 100, 1e4, 1e19, 1e30, 3e38, np.inf]
FAR = np.array([*(-x for x in FAR), *FAR, np.nan])
OF_ONE = ["negative", "exp", "expm1", "log", "sqrt", "tanh", "sigmoid", "relu", "elu", "softplus",
          "gelu", "gelu_tanh", "log_sigmoid"]  # fmt: skip
OF_TWO = ["add", "subtract", "multiply", "divide", "maximum"]
GRADS = ["relu_grad", "elu_grad", "gelu_grad", "gelu_tanh_grad"]
ROWS = [[-np.inf, 0, 1], [-np.inf] * 3, [1e30, -1e30, 0], [np.inf, 0, 0], [3e38, 3e38, -3e38],
        [np.nan, 0, 1], [-1e4, -1e4, -2e4]]  # fmt: skip


def far_out(name, dtype):
    """Arrays of numbers that overflow, of infinities and NaN, for a function."""
    if name in OF_ONE:
        return [FAR]
    if name in OF_TWO:
        return np.meshgrid(FAR, FAR)
    if name == "gelu_grad":  # whose slope at -20 is 0 in float32, and 1e-86 in float64
        return np.meshgrid(FAR[abs(FAR) != 20], [1.5, -np.inf])
    if name in GRADS:
        return np.meshgrid(FAR, [1.5, -np.inf])
    rows = np.array(ROWS).astype(dtype).astype(float)
    return [rows]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the simulator's threads, too
@pytest.mark.parametrize("home", HOMES, ids=str)
@pytest.mark.parametrize("name", OF_ONE + OF_TWO + GRADS + ["softmax", "log_softmax", "logsumexp"])
def test_far_out(name, home):
    """What overflows is infinite, what vanishes is 0, and nothing is NaN that has a value."""
    if home.place == "cuda" and not device.is_available():
        pytest.skip(device.why_unavailable())
    room, meaning = next((room, m) for room, m in TABLE if m.name == name)
    others = {"number": None} if name in OF_TWO else {}
    with np.errstate(all="ignore"):
        arrays = [
            laid("C", a, as_dtype(home.dtype), home.place)
            for a in far_out(name, as_dtype(home.dtype))
        ]
        got = meaning.call(getattr(room, name), arrays, others)
        rounded = [values(a) for a in arrays]
        expected = meaning.meaning(*rounded, **others)
        sizes = expected if meaning.terms is None else meaning.terms(*rounded, **others)
        got = values(got.data if room is F else got)
        near(got, expected, home, 32, sizes, as_dtype(home.dtype), 2 * finfo("float32").tiny)


@draws(30, "copies")
@given(st.data(), st.sampled_from(HOMES), st.tuples(forms, forms), seeds)
@pytest.mark.simulator
def test_copies(data, home, orders, seed):
    """Into any order of memory, and nothing beside it."""
    if home.place == "cuda" and not device.is_available():
        return
    shape = data.draw(shapes)
    source, target = np.random.default_rng(seed).standard_normal((2, *shape))
    there = [laid(form, a, as_dtype(home.dtype), home.place)
             for form, a in zip(orders, (source, target), strict=True)]  # fmt: skip
    if home.place == "cpu" and not there[1].flags.writeable:
        with pytest.raises(ValueError, match="read-only"):
            ops.copy_into(there[1], there[0])
        return
    ops.copy_into(there[1], there[0])
    np.testing.assert_array_equal(values(there[1]), values(there[0]))


ELSEWHERE = {  # with tests of their own
    *("matmul", "sddmm", "sddmm_into", "sddmm_in_parts", "linear", "repeated_product"),
    *("conv", "conv_transpose", "conv_weight_grad", "conv_window", "known_window"),
    *("lstm", "lstm_step_by_step", "lstm_grad", "cell", "cell_grad", "repeated_cell"),
    *("affine_norm", "affine_norm_grad", "affine_norm_sums", "repeated_norm"),
    *("column_dots", "column_norms", "scale_columns", "normalise_columns", "inside"),
    *("scale_blocks", "gated", "ungated", "block_dots", "multiplies_gates"),
    *("adam_step", "sgd_step", "average_step", "check_average"),
    *("scale_to_norm", "judge", "guarded_adam_numbers", "guarded_sgd_numbers", "check_step"),
    *(
        "copy_into",
        "dropout_mask",
        "operand",
        "remap",
        "in_layout",
        "placed",
        "block_norms",
    ),
    *("transpose_window", "repeated", "replayed", "replayed_in", "started", "check_factors"),
    *("check_lstm", "add_into", "aligned", "begins_anywhere"),
}
OF_NO_ARRAYS = {
    *("HalfOnCPU", "LSTMCells", "LSTMTrace", "adam_numbers", "checked_precision", "own_precision"),
    *("set_precision", "draws_noted", "draws_repeated", "full", "zeros", "index_beside", "is_half"),
    *("size_of_blocks", "without_padding", "row_norms"),
    *(
        "space_of",
        "state_dtype",
        "checked_norm",
        "gate_numbers",
        "select_gated",
        "in_order",
        "all_blocks",
        "all_of",
        "logistic_noise",
    ),
}


@pytest.mark.parametrize("room", [ops, F], ids=["ops", "functional"])
def test_no_function_is_missing(room):
    drawn = {m.name for where, m in TABLE if where is room}
    public = {name for name in room.__all__ if callable(getattr(room, name))}
    assert public <= drawn | ELSEWHERE | OF_NO_ARRAYS
    assert drawn <= public
