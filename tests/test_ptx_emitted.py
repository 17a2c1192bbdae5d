"""Kernels of the other tests compile to the instructions that they name; no GPU is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from numba import float32 as f32
from numba import int64 as i64
from numba import uint16 as u16
from numba import uint32 as u32

EMITTED = {
    "mma_f16_kernel": (
        (u32[:, ::1], u32[:, ::1], f32[:, ::1], f32[:, ::1]),
        ["mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "],
    ),
    "mma_bf16_kernel": (
        (u32[:, ::1], u32[:, ::1], f32[:, ::1], f32[:, ::1]),
        ["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "],
    ),
    "mma_tf32_kernel": (
        (u32[:, ::1], u32[:, ::1], f32[:, ::1], f32[:, ::1]),
        ["mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "],
    ),
    "ldmatrix_kernel": (
        (u16[:, ::1], i64[::1], u32[:, :, ::1]),
        [
            ".shared .align 16 ",
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 ",
            "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 ",
        ],
    ),
    "ldmatrix_if_kernel": (
        (u16[:, ::1], u32[::1], u32[:, ::1], u32[:, :, :, ::1]),
        [
            "setp.ne.u32 p, %r",
            "@p ldmatrix.sync.aligned.m8n8.x4.shared.b16 ",
            "@p ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 ",
        ],
    ),
    "copy_kernel": (
        (f32[:, ::1], f32[:, ::1]),
        [
            "cp.async.cg.shared.global [%r",
            "cp.async.commit_group;",
            "cp.async.wait_group 1;",
            "cp.async.wait_group 0;",
        ],
    ),
    "zero_fill_kernel": ((u16[:, ::1], u16[:, ::1]), ["], 16, %r"]),
    "word_kernel": ((u32[::1], u32[::1]), ["cp.async.ca.shared.global [%r", "], 4, %r"]),
    "wide_kernel": (
        (f32[:, ::1], u16[:, ::1], f32[:, ::1], u16[:, ::1]),
        [
            "ld.global.v4.f32",
            "st.shared.v4.f32",
            "ld.shared.v4.f32",
            "st.global.v4.f32",
            "ld.global.v4.u32",
            "st.global.v4.u32",
        ],
    ),
    "narrow_kernel": (
        (u32[:, ::1], u32[:, ::1]),
        [
            "ld.global.v2.u32",
            "st.shared.v2.u32",
            "bar.warp.sync 0xffffffff;",
            "ld.shared.v2.u32",
            "st.global.v2.u32",
        ],
    ),
    "convert_kernel": (
        (f32[:, ::1], u32[:, :, ::1]),
        ["cvt.rna.tf32.f32 ", "cvt.rn.f16x2.f32 ", "cvt.rn.bf16x2.f32 "],
    ),
    "shuffle_kernel": (
        (u32[::1], i64[::1], u32[:, ::1]),
        ["shfl.sync.bfly.b32 ", "shfl.sync.idx.b32 ", "redux.sync.or.b32 "],
    ),
}

COMPILE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import test_ptx, test_ptx_emitted, test_ptx_mma
from numba import cuda
from numbsparse.device.compiler import load_numba
load_numba()
print(json.dumps({
    name: cuda.compile_ptx((vars(test_ptx) | vars(test_ptx_mma))[name].py_func, types, cc=(8, 0))[0]
    for name, (types, _) in test_ptx_emitted.EMITTED.items()
}))
"""


@pytest.fixture(scope="module")
def compiled(compilers: None) -> dict[str, str]:
    """The PTX of each kernel, from a process without the simulator; no GPU is needed."""
    run = subprocess.run(
        [sys.executable, "-c", COMPILE, str(Path(__file__).parent)],
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("name", EMITTED)
def test_the_compiler_emits(name, compiled):
    missing = [text for text in EMITTED[name][1] if text not in compiled[name]]
    assert not missing, compiled[name]
