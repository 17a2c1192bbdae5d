"""Cards that are not Hopper's: what each rung that serves asks of one that is not there."""

import os
import subprocess
import sys

import numpy as np
import pytest

import numbsparse as ns
from numbsparse import device
from numbsparse.dtypes import as_dtype
from numbsparse.kernels import card, conv
from numbsparse.kernels.matmul import RUNGS, reach, rung
from numbsparse.kernels.matmul.k7_small_blocks import strip_plan
from numbsparse.kernels.parts.strip import Strip
from numbsparse.ops import index_beside

PROGRAM = """
import sys
from itertools import islice
import numpy as np
from numbsparse.bench import contestants, held_out, problem
from numbsparse.device import empty, launch, stand_in
from numbsparse.machine_code.fits import misfit

capability, units, seed = (int(sys.argv[1]), int(sys.argv[2])), int(sys.argv[3]), int(sys.argv[4])
stand_in.install(capability, units, lambda kernel, signature: None, lambda *of: misfits(*of))
problem.Operand.device = property(lambda self: empty(self.shape, self.dtype))
problem.Operand.feature_major = property(lambda self: empty(self.shape[::-1], self.dtype).T)
used, where = set(), ""

def misfits(kernel, how):
    if reason := misfit(how):
        print(where, reason)

def call(of, name, make):
    global where
    where = f"{of} by {name}:"
    used.add(name)
    make().call()

rng = np.random.default_rng(seed)
for of in islice(held_out.drawn(rng), 25):
    p = of.problem
    for name in {*contestants.named(p, of.product, "all"), of.taken()}:
        call(of, name, lambda: contestants.of_rung(p, of.product, name, of.feature_major))
for of in islice(held_out.convolutions(rng), 60):
    names = held_out.rungs_of_images(of.problem, of.product)
    for name in {name.partition("/")[0] for name in names}:
        call(of, name, lambda: contestants.of_rung(of.problem, of.product, name))
    call(of, "auto", lambda: contestants.by_ops(of.problem, of.product))
print(*sorted(used))
"""
LATER = {"k7_small_blocks", "k6_strips"}  # than 8.0


@pytest.mark.parametrize(
    ("capability", "units", "seed", "rungs"),
    [("8 6", 46, 731946205, set()), ("12 0", 170, 731946209, LATER)],
    ids=["8.6", "12.0"],
)
def test_no_call_asks_for_more_than_the_card_has(capability, units, seed, rungs):
    pytest.importorskip("cuda.core")
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_ENABLE_CUDASIM"}
    words = map(str, (*capability.split(), units, seed))
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, *words]
    said = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    *misfits, used = said.stdout.splitlines()
    assert misfits == []
    least = {"auto", "k1_naive", "k2_unfolded", "k3_tensor_core", "k5_tensor_core"}
    assert {*used.split()} >= least | rungs
    assert not {*used.split()} & {"k6_hopper", "k9_dense_tiles", "k4_wgmma"}  # which are Hopper's


@pytest.mark.parametrize("capability", [(10, 0), (12, 0), (8, 9)], ids=str)
def test_what_wgmma_multiplies_is_hoppers(capability, monkeypatch):
    monkeypatch.setattr(reach, "SIMULATED", False)
    monkeypatch.setattr(reach, "compute_capability", lambda: capability)
    asked = "forward", as_dtype("float16"), "cuda"
    for of, names, size in (
        (rung, [name for name in RUNGS if name[:2] in ("k6", "k9")], {"k6": 32, "k9": 8}),
        (conv.rung, ["k4_wgmma"], {"k4": 32}),
    ):
        for name in names:
            product, *how = asked
            reason = of(name).unsupported(product, size[name[:2]], *how)
            assert reason.endswith(f"needs compute capability 9.0, this GPU is {said(capability)}")


def said(capability):
    return ".".join(map(str, capability))


@pytest.mark.parametrize("kib", [99, 163, 227])
def test_boxes_of_images_fit_beside_blocks_of_w(kib):
    k3 = conv.rung("k3_tensor_core")
    for size, shape in k3.SHAPES.items():
        rows = k3.most_rows(shape, size, 1024 * kib)
        stage = 2 * size * (rows + shape.taps * size)
        beside = 12 * shape.ROWS + 64 * shape.height * shape.WARPS
        assert rows % 8 == 0
        assert 0 < rows <= shape.ROWS
        assert k3.STAGES * stage + beside <= 1024 * kib
        assert rows == shape.ROWS or kib == 99


@pytest.mark.parametrize("kib", [99, 227])
@pytest.mark.parametrize(
    ("sizes", "case", "places", "taken"),
    [
        ((576, 5440, 2272), (8, 4, 15907), 132, 98304),
        ((320, 2976, 2336), (8, 4, 5782), 170, 98304),
        ((1664, 8000, 928), (8, 2, 31286), 132, 131072),
        ((864, 7776, 1312), (16, 2, 9221), 132, 131072),
    ],
)
def test_parts_of_strips_fit(sizes, case, places, taken, kib, monkeypatch):
    """With 227 KiB they take what leaves no room for a ring of boxes with 99."""
    monkeypatch.setattr(strip_plan, "SIMULATED", False)
    monkeypatch.setattr(strip_plan, "shared_memory", lambda: 1024 * kib)
    strip_plan.shared_out.cache_clear()
    warps, split, rows = strip_plan.shared_out(sizes, *case, places)
    strip_plan.shared_out.cache_clear()
    of_parts = Strip(case[0], rows, warps, 32, 0, 0, 0, ITEM=case[1], SPLIT=split).PART_BYTES
    if kib == 227:
        assert of_parts == taken
    assert 1024 * kib >= of_parts + strip_plan.BEHIND


def test_shared_memory_is_that_of_the_card(monkeypatch):
    monkeypatch.setattr(card, "SIMULATED", False)
    of = {(7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
    for capability, kib in of.items():
        monkeypatch.setattr(card, "compute_capability", lambda capability=capability: capability)
        assert card.shared_memory() == 1024 * kib, capability


@pytest.mark.skipif(not device.is_available(), reason=str(device.why_unavailable()))
@pytest.mark.parametrize(
    ("capability", "beside"), [((8, 0), 2), ((8, 6), 1), ((9, 0), 3), ((12, 0), 1)], ids=str
)
def test_sums_of_float32_are_cut_for_as_many_blocks_as_fit(capability, beside, monkeypatch):
    of_blocks, cuts = rung("k5_tensor_core").of_blocks, []
    monkeypatch.setattr(card, "SIMULATED", False)
    monkeypatch.setattr(card, "compute_capability", lambda: capability)
    monkeypatch.setattr(of_blocks, "multiprocessors", lambda: 40)

    def launched(kernel, blocks, threads, factors, cut, *more, shared_bytes):
        there = card.shared_memory() + 1024
        assert min(there // (shared_bytes + 1024), 3) >= (beside if shared_bytes == 65536 else 3)
        cuts.append(cut.many)

    monkeypatch.setattr(of_blocks, "launch", launched)
    monkeypatch.setattr(of_blocks, "block_kernel", lambda shape: None)
    w = ns.BlockSparse(np.zeros((10, 64, 64), np.float32), np.eye(10, dtype=bool)).to("cuda")
    for dtype in ("float32", "float16"):
        x = device.empty((4096, 640), dtype)
        out = device.empty(w.values.shape, dtype)
        of_blocks.multiply_blocks(x, x, index_beside(w.layout, x), out, dtype)
    assert cuts == [4 * beside, 12]
