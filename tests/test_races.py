"""Races are found whatever the threads' order was, and an order can be chosen."""

from functools import partial

import numpy as np
import pytest
from numba import cuda, float32

import numbsparse as ns
from numbsparse import device
from numbsparse.device.launch import launch
from numbsparse.kernels import ptx
from numbsparse.kernels.matmul import LADDER, PRODUCTS
from numbsparse.testing import Case, check_rung, count, in_turns, races

simulator = pytest.mark.skipif(not device.SIMULATED, reason="takes the simulator")


def shift_kernel(barrier):
    @cuda.jit
    def kernel(x, y):
        tile = cuda.shared.array(64, float32)
        t = cuda.threadIdx.x
        tile[t] = x[t]  # written here
        barrier()
        y[t] = tile[(t + 1) % cuda.blockDim.x]

    return kernel


def nothing():
    pass


def all_threads():
    cuda.syncthreads()


no_barrier_kernel = shift_kernel(cuda.jit(device=True)(nothing))
barrier_kernel = shift_kernel(cuda.jit(device=True)(all_threads))
warp_kernel = shift_kernel(ptx.sync_warp)


@cuda.jit
def same_place_kernel(x, y):
    y[0] = x[cuda.grid(1)]


@cuda.jit
def neighbour_kernel(x, y):
    i = cuda.grid(1)
    y[i] = 1
    y[i + 1] = 2


@cuda.jit
def failing_kernel(x, y):
    tile = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    if t == 3:
        raise ValueError("thread 3")
    cuda.syncthreads()
    y[t] = tile[t]


def operands(n=64):
    return ns.to_device(np.arange(n, dtype=np.float32)), ns.to_device(np.full(n + 1, np.nan, "f4"))


def found(kernel, threads, grid=1):
    x, y = operands(max(64, threads * grid))
    return races(lambda: launch(kernel, grid, threads, x, y))


@simulator
@pytest.mark.parametrize("threads", [4, 32, 64])
def test_a_missing_barrier_is_found_where_it_is_missing(threads):
    (race,) = found(no_barrier_kernel, threads)
    assert race.space == "shared"
    assert not race.others_write
    assert race.pairs == threads
    assert race.written_at.startswith("test_races.py:")
    assert int(race.others_at.partition(":")[2]) == int(race.written_at.partition(":")[2]) + 2
    assert f"{threads} such pairs" in str(race)


@simulator
@pytest.mark.parametrize(
    ("kernel", "threads", "pairs"),
    [(barrier_kernel, 64, 0), (warp_kernel, 32, 0), (warp_kernel, 64, 2)],
    ids=["block", "one warp", "two warps"],
)
def test_a_barrier_orders_those_who_meet_at_it(kernel, threads, pairs):
    assert sum(race.pairs for race in found(kernel, threads)) == pairs


@simulator
def test_two_writes_are_one_race():
    (race,) = found(same_place_kernel, 4)
    assert (race.space, race.others_write, race.of_another_block, race.pairs) == (
        *("global", True, False),
        12,
    )


@simulator
def test_blocks_are_never_ordered():
    (race,) = found(neighbour_kernel, 1, grid=3)
    assert race.of_another_block
    assert race.pairs == 2
    assert "of another block writes" in str(race)


@simulator
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", ["k1_naive", "k3_registers"])
def test_rungs_have_no_races(name, product):
    case = Case(batch=7, in_features=40, out_features=30, block_size=16, density=0.7)
    assert races(lambda: check_rung(LADDER[name], product, case, "float32", "cuda")) == []


@simulator
@pytest.mark.pairs
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    ("name", "B", "batch"),
    [
        ("k5_tensor_core", 16, 8),
        ("k6_hopper", 32, 40),
        ("k6_hopper", 32, 67),
        ("k7_small_blocks", 8, 40),
        ("k7_small_blocks", 8, 67),
        ("k8_small_batch", 32, 9),
        ("k8_small_batch", 8, 9),
    ],
)
@pytest.mark.parametrize("order", ["batch-major", "feature-major"])
@pytest.mark.usefixtures("no_garbage")
def test_rungs_with_copies_have_no_races(order, name, B, batch, dtype, product):
    """With more steps than a ring has stages."""
    case = Case(batch, in_features=5 * B, out_features=3 * B, block_size=B, density=0.7)
    of = {"feature_major": order == "feature-major"}
    run = partial(check_rung, LADDER[name], product, case, dtype, "cuda", **of)
    assert races(run) == []


@simulator
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(
    ("name", "B", "dtype"),
    [
        ("k6_hopper", 32, "float32"),
        ("k7_small_blocks", 8, "float32"),
        ("k9_dense_tiles", 8, "float16"),
    ],
)
@pytest.mark.usefixtures("no_garbage")
def test_what_others_stored_is_repaired_after_them(name, B, dtype, rng):
    """Lines that begin anywhere are stored by other lanes than have their sums; an infinity makes
    NaN of some, where a sum is split or meets zeros."""
    layout = ns.Layout(np.eye(3, dtype=bool) | (rng.random((3, 3)) < 0.4))
    values = ns.to_device(rng.integers(1, 4, (layout.n_blocks, B, B)).astype(dtype))
    x = rng.integers(1, 4, (3 * B, 67)).astype(dtype)
    x[B + 3, 40] = np.inf
    y = ns.to_device(np.full((3 * B, 67), np.nan, dtype))
    operands = ns.to_device(x).T, values, ns.ops.index_beside(layout, values), y.T
    assert races(lambda: LADDER[name].forward(*operands)) == []
    dense = ns.BlockSparse(values.numpy(), layout).toarray().astype(float)
    met = np.where(dense == 0, 0, x.T[:, :, None].astype(float)) * dense
    np.testing.assert_array_equal(y.numpy().T.astype(float), met.sum(1))


@simulator
@pytest.mark.parametrize(("order", "wrong"), [("rising", [*range(63)]), ("falling", [63])])
def test_the_order_decides_who_reads_too_early(order, wrong):
    x, y = operands()
    right = np.roll(x.numpy(), -1)
    with in_turns(order):
        launch(barrier_kernel, 1, 64, x, y)
        np.testing.assert_array_equal(y.numpy()[:64], right)
        launch(spoilt_kernel, 1, 64, x, y)
    assert np.flatnonzero(y.numpy()[:64] != right).tolist() == wrong


@cuda.jit
def spoilt_kernel(x, y):
    tile = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    tile[t] = -1
    cuda.syncthreads()
    tile[t] = x[t]
    y[t] = tile[(t + 1) % cuda.blockDim.x]


@simulator
@pytest.mark.pairs
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("order", ["rising", "falling", 0, 1])
@pytest.mark.parametrize(
    ("name", "block_size", "dtype"),
    [
        ("k3_registers", 8, "float32"),  # barriers of the block
        ("k5_tensor_core", 16, "float16"),  # and of warps
        ("k6_hopper", 32, "float16"),  # and the copy engine's
    ],
)
def test_rungs_are_right_in_every_order(name, block_size, dtype, order, product):
    case = Case(batch=7, in_features=40, out_features=46, block_size=block_size, density=0.7)
    with in_turns(order):
        check_rung(LADDER[name], product, case, dtype, "cuda")


@simulator
def test_counts_are_the_same_in_turns():
    x, y = operands()
    plain = count(lambda: launch(barrier_kernel, 1, 64, x, y))
    with in_turns():
        assert count(lambda: launch(barrier_kernel, 1, 64, x, y)) == plain


@simulator
def test_in_turns_refuses_and_leaves_nothing_behind():
    x, y = operands()
    with in_turns("falling"):
        with pytest.raises(ValueError, match="thread 3"):
            launch(failing_kernel, 1, 8, x, y)
        launch(barrier_kernel, 1, 64, x, y)
    np.testing.assert_array_equal(y.numpy()[:64], np.roll(x.numpy(), -1))
    with pytest.raises(ValueError, match="order takes"), in_turns("sideways"):
        pass


@pytest.mark.skipif(device.SIMULATED, reason="without the simulator")
def test_refuse_without_the_simulator():
    with pytest.raises(RuntimeError, match="NUMBA_ENABLE_CUDASIM=1"):
        races(lambda: None)
    with pytest.raises(RuntimeError, match="NUMBA_ENABLE_CUDASIM=1"), in_turns():
        pass
