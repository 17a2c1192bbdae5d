"""Machine code is told apart and described rightly; what is committed is what compiles here."""

import json
import os
import struct
import subprocess
import sys

import pytest

from numbsparse import __main__ as command_line
from numbsparse import device
from numbsparse.kernels import conv, ladder, matmul
from numbsparse.machine_code import fits, gate
from numbsparse.machine_code.calls import calls
from numbsparse.machine_code.cubin import description, shared_bytes


def test_each_rung_for_gpus_is_in_some_call():
    for what, rungs in (("matmul", matmul.RUNGS), ("conv", conv.RUNGS)):
        for name in (name for name, place in rungs.items() if place == "cuda"):
            if (what, name) != ("conv", "k1_naive"):  # which no tensor core serves
                assert any(call.startswith(f"{what} {name} ") for call in calls()), name


def test_steps_have_no_stack_and_fit_on_a_multiprocessor():
    """A quarter of its 65,536 registers serves a quarter of the warps."""
    committed = json.loads(gate.COMMITTED.read_text())["calls"]
    for name in ladder.NAMES:
        own = [kernel for call in committed if f" {name}, " in call for kernel in committed[call]]
        warps = -(-ladder.step(name).THREADS // 128)
        assert own, name
        for kernel in own:
            assert kernel["stack"] == kernel["stack_instructions"] == 0, name
            assert 32 * warps * -(-kernel["registers"] // 8) * 8 <= 65_536 // 4, name


def test_the_committed_kernels_are_those_of_all_calls():
    committed = json.loads(gate.COMMITTED.read_text())
    assert committed["calls"].keys() == calls().keys()
    assert set(committed["compilers"]) == set(gate.COMPILERS)
    for name, kernels in committed["calls"].items():
        assert all(each.keys() == {"kernel", *description_keys()} for each in kernels), name


def description_keys():
    return description(elf({".text.kernel": b"\0" * 16, ".nv.info": info(32, 0)})).keys()


def elf(sections):
    """A file with these sections, laid out as a linker does: header, bytes, names, table."""
    names, body, headers = b"\0", b"\0" * 64, [(0,) * 10]
    for name, data in {**sections, ".shstrtab": None}.items():
        at, names = len(names), names + name.encode() + b"\0"
        data = names if data is None else data
        headers.append((at, 1, 0, 0, len(body), len(data), 0, 0, 1, 0))
        body += data
    table = b"".join(struct.pack("<IIQQQQIIQQ", *header) for header in headers)
    head = bytearray(body[:64])
    struct.pack_into("<Q", head, 40, len(body))
    struct.pack_into("<3H", head, 58, 64, len(headers), len(headers) - 1)
    return bytes(head) + body[64:] + table


def info(registers, stack):
    """What a cubin says of its kernel, beside what is not asked for."""
    aside = struct.pack("<BBH", 3, 0x1B, 255) + struct.pack("<BBHIII", 4, 0x17, 12, 1, 2, 3)
    said = ((0x2F, registers), (0x11, stack))
    return aside + b"".join(struct.pack("<BBHII", 4, a, 8, 7, value) for a, value in said) + aside


def test_a_kernel_is_described():
    codes = (0x947, 0x387, 0x983, 0x983, 0x381)  # of which three go to the stack and back
    text = b"".join(struct.pack("<QQ", 0xABC000 | code, 5) for code in codes)
    found = description(elf({".nv.info": info(168, 48), ".text._ZN3k": text}))
    assert found.pop("hash")
    assert found == {"instructions": 5, "registers": 168, "stack": 48, "stack_instructions": 3}


def test_shared_memory_of_a_kernel_is_counted():
    found = {".nv.shared._ZN3k": b"\0" * 1184, ".text": b""}
    assert shared_bytes(elf(found)) == 1184
    assert shared_bytes(elf({**found, ".nv.shared.reserved.0": b"\0" * 64})) == 160


def test_hashes_are_of_instructions_and_constants_only():
    sections = {".text.a": bytes(32), ".nv.constant0.a": b"12", ".nv.info": info(1, 0), ".x": b"1"}
    hashes = [
        description(elf(sections | other))["hash"]
        for other in ({}, {".x": b"2"}, {".text.a": b"\1" * 32}, {".nv.constant0.a": b"13"})
    ]
    assert hashes[0] == hashes[1]
    assert len({*hashes}) == 3


def kernel(name, hash_, stack=0):
    return {"kernel": name, "instructions": 1000, "registers": 90, "stack": stack, "hash": hash_}


def test_what_differs_is_reported():
    before = {"call": [kernel("a", "1"), kernel("b", "2"), kernel("c", "3")], "more": []}
    now = {"call": [kernel("renamed", "1"), kernel("b", "4", 64)], "more": [kernel("d", "5")]}
    assert gate.changes(before, now) == [
        ["call", "b", "1,000", "90", "0 to 64"],
        ["call", "c: gone", "1,000", "90", "0"],
        ["more", "d: new", "1,000", "90", "0"],
    ]
    assert gate.changes(now, now) == []


def test_what_was_found_of_other_calls_stays_unless_the_compilers_differ(tmp_path):
    first, second, *_ = calls()
    file = tmp_path / "found.json"
    gate._write(file, {second: [kernel("b", "1")]}, {"nvvm": "1"})
    gate._write(file, {first: [kernel("a", "1")]}, {"nvvm": "1"})
    found = json.loads(file.read_text())["calls"]
    assert list(found) == [first, second]
    gate._write(file, {first: [kernel("a", "1")]}, {"nvvm": "2"})
    assert list(json.loads(file.read_text())["calls"]) == [first]


@pytest.mark.skipif(not device.SIMULATED, reason="the simulator refuses")
def test_the_simulator_compiles_nothing():
    with pytest.raises(SystemExit, match="the simulator compiles nothing"):
        command_line.main(["machine-code", "k1_naive"])


def compiled(*words):
    """The command in a process without the simulator, and without a GPU."""
    return subprocess.run(
        [sys.executable, "-m", "numbsparse", "machine-code", *words, "--jobs", "1"],
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "0", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_kernels_are_as_committed(compilers):
    ended = compiled("s10_wgmma, B = 32", "k1_naive forward")
    assert ended.stdout.startswith("2 calls, 2 kernels; compiled by numba-cuda "), ended.stderr
    assert "| call | kernel | instructions | registers | stack |" in ended.stdout
    if "not compared: those committed were compiled by" not in ended.stdout:
        assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, "all are as committed")


def test_other_cards_compile_and_are_told_what_serves_there(compilers):
    words = "k3_registers forward", "k9_dense_tiles", "s10_wgmma, B = 32"
    for capability, served in (("7.5", 1), ("12.0", 1)):
        ended = compiled(*words, "--capability", capability)
        said = f"{served} of 4 calls serve compute capability {capability}\n"
        assert (ended.returncode, ended.stdout) == (0, said), ended.stderr


@pytest.mark.parametrize("word", ["8", "8.x", "6.1", ".6", "8.6.1", ""])
def test_a_capability_that_is_none_is_refused(word, capsys):
    with pytest.raises(SystemExit, match="2"):
        command_line.main(["machine-code", "--capability", word])
    assert f"takes one of 7.0 and up, such as 8.6, got {word!r}" in capsys.readouterr().err


def test_what_does_not_fit_is_said(monkeypatch):
    monkeypatch.setattr(fits, "shared_memory", lambda: 99 * 1024)
    monkeypatch.setattr(fits, "copy_engine", lambda: False)
    how = {"grid": (9, 9), "block": 256, "dynamic": 96 * 1024, "cluster": None, "overlap": False}
    for change, static, registers, reason in (
        ({}, 3 * 1024, 255, None),
        ({}, 4 * 1024, 0, "takes 102400 bytes of shared memory of a block, which has up to 101376"),
        ({"block": (32, 33)}, 0, 0, "takes a grid of (9, 9) and 1056 threads of a block"),
        ({"grid": (9, 65536)}, 0, 0, "takes a grid of (9, 65536) and 256 threads of a block"),
        ({"block": 300}, 0, 170, "takes 170 registers of 300 threads each"),
        ({"cluster": (2,)}, 0, 0, "takes clusters, or overlaps the kernel before it"),
        ({"overlap": True}, 0, 0, "takes clusters, or overlaps the kernel before it"),
    ):
        launch = *(how | change).values(), False
        assert fits.misfit(launch, static, registers) == reason, change


OLDER_CARD = """
import numpy as np
from numbsparse.device import stand_in
stand_in.install((7, 5), 40)
from numbsparse.device import empty, to_device
from numbsparse.kernels.gates import scale_blocks
a, gates = empty((2, 32, 32), "float16"), to_device(np.ones(2, np.float32))
scale_blocks(a, to_device(np.arange(2)), gates, gates, 1, empty(a.shape, a.dtype))
"""


def test_blocks_of_16_bits_are_scaled_on_cards_that_round_no_pairs(compilers):
    ended = subprocess.run(
        [sys.executable, "-c", OLDER_CARD],
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "0"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr


SMALL_PRODUCTS = """
from itertools import product as every
import numpy as np, numbsparse as ns
from numbsparse.device import compiler, stand_in

stand_in.install()
built = []
compiler.build = lambda *of: built.append(of) or compiler.Built(object(), "", None)

def operand(batch, order, dtype):
    if order == "C":
        return ns.to_device(np.zeros((batch, 512), dtype))
    return ns.to_device(np.zeros((512, batch), dtype)).T

for size, dtype, batch in every((8, 32, 64), ("float32", "float16"), (16, 64, 256, 1024)):
    layout = ns.Layout(ns.patterns.random(512 // size, 512 // size, 0.1, seed=0))
    w = ns.BlockSparse(np.zeros((layout.n_blocks, size, size), dtype), layout).to("cuda")
    for one, other in every("CF", "CF"):
        x, dy = operand(batch, one, dtype), operand(batch, other, dtype)
        ns.matmul(x, w if other == "C" else w.T)
        ns.sddmm(x.T, dy, layout, block_size=size)
print(len(built))
"""
MOST_KERNELS = 126  # each takes a second or two before the first results of 192 products are there


def test_small_products_share_kernels():
    """Every size, dtype and order of theirs; the choice is that of an H200. Nothing is compiled."""
    pytest.importorskip("cuda.core")
    ended = subprocess.run(
        [sys.executable, "-c", SMALL_PRODUCTS],
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "0", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) <= MOST_KERNELS


def test_a_word_in_no_call_is_refused(monkeypatch):
    monkeypatch.setattr(gate, "_require", lambda: None)
    with pytest.raises(SystemExit, match="numbsparse: no call has k98 or k99 in its name"):
        command_line.main(["machine-code", "k98", "k99"])
