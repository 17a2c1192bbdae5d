"""Files damaged at random: refused by a ValueError, or loaded as they were saved.

`NUMBSPARSE_DRAWS=300 pytest tests/test_drawn_files.py` draws 300 times as many.
"""

import zipfile
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from conftest import HAS_BFLOAT16
from drawn import DRAWS, SEED
from npz_helpers import MATRIX, STATE, matrix, npy, refused, same, zipped

import numbsparse as ns

LOADERS = [ns.BlockSparse.load, ns.load]


def damaged(rng, content):
    """Bytes flipped, cut off, left out, put in or exchanged, in one place."""
    content, at = bytearray(content), int(rng.integers(len(content)))
    end = at + int(rng.integers(1, 40))
    kind = rng.integers(6)
    if kind < 2:
        content[at] ^= 1 << int(rng.integers(8))
    elif kind == 2:
        del content[at:]
    elif kind == 3:
        del content[at:end]
    elif kind == 4:
        content[at:at] = rng.bytes(end - at)
    else:
        content[at:end] = rng.choice([b"\0", b"\xff", b"PK\1\2"]) * (end - at)
    return bytes(content)


@pytest.mark.slow
def test_drawn_damage(tmp_path):
    """What is loaded in spite of it, such as from a file with another date, is what was saved."""
    ns.save(tmp_path / "state.npz", STATE)
    w = STATE["model"]["weight"]
    valid = [
        (ns.BlockSparse.load, matrix(), w),
        (ns.BlockSparse.load, matrix(compression=zipfile.ZIP_DEFLATED), w),
        (ns.load, (tmp_path / "state.npz").read_bytes(), STATE),
    ]
    for draw in range(300 * DRAWS):
        rng = np.random.default_rng([SEED, draw])
        load, content, saved = valid[rng.integers(len(valid))]
        with named(draw):
            loaded, error = refused(load, tmp_path / "drawn.npz", damaged(rng, content))
            if error is None:
                same(loaded, saved)


@contextmanager
def named(draw):
    """A failure says which draw it was."""
    try:
        yield
    except BaseException:
        print(f"draw {draw}")
        raise


ARRAYS = [
    np.zeros(()), np.array(-1), np.array(2**63, np.uint64), np.array([0, 2, 3]),
    np.array([0, 2, 1]),
    np.array([3, 2, 0], np.uint8), np.array([7, 12]), np.array([-4, 2**40]), np.array([np.nan, 2]),
    np.zeros((3, 4, 4)), np.zeros((3, 4, 4), "V2"), np.zeros((0, 4, 4)), np.zeros((3, 0, 0)),
    np.zeros((2, 2, 2), bool), np.array(b"bsr"), np.array("bsr"), np.array(["a", "\0"]),
    np.zeros(3, "M8[s]"), np.zeros(2, [("a", "<i4"), ("b", "S3")]), np.zeros((1, 0, 1 << 20)),
]  # fmt: skip
FIELDS = {
    "descr": ["<f4", ">f8", "|O", "<U1", "|V2", "|V0", "<i8", "bad", [("a", "|O")], None],
    "shape": [(), (3,), (3, 4, 4), (-1,), (1 << 62, 4), (0, 1 << 62), (2.5,), [3], None],
    "fortran_order": [True, 1, None, "yes"],
}
KEYS = [
    *MATRIX, *(f"w@{name}" for name in MATRIX), "w", "w/x", "w/", "/", "", "@", "w@", "a@b@c",
    "@list", "w@list", "w@tuple", "w/0", "w/1", "w@none", "w@int", "l@list", "l/1@list",
]  # fmt: skip


@pytest.mark.slow
def test_drawn_members(tmp_path):
    """Arrays and headers of all kinds under names that mean something, their checksums right."""
    for draw in range(100 * DRAWS):
        rng = np.random.default_rng([SEED, 1, draw])
        members = {key: npy(array) for key, array in MATRIX.items()}
        if rng.random() < 0.5:
            members = {f"w@{key}": content for key, content in members.items()}
        for _ in range(rng.integers(1, 4)):
            key = KEYS[rng.integers(len(KEYS))]
            if rng.random() < 0.7:
                key = list(members)[rng.integers(len(members))]
            array = ARRAYS[rng.integers(len(ARRAYS))]
            fields = [name for name in FIELDS if rng.random() < 0.15]
            says = {name: FIELDS[name][rng.integers(len(FIELDS[name]))] for name in fields}
            members[key] = npy(array, **says)
        content = zipped(members, rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))
        for load in LOADERS:
            # Two bytes a value are bfloat16, where that is installed.
            with named(draw), suppress(*[] if HAS_BFLOAT16 else [ImportError]):
                loaded, _ = refused(load, tmp_path / "drawn.npz", content)
                repr(loaded)
