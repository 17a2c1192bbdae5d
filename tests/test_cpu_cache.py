"""CPU kernels on disk: nothing there, and no lack of room, makes a product fail."""

import errno
import os
import pickle

import pytest
from numba import types

from numbsparse import files
from numbsparse.device import kept
from numbsparse.kernels import cores


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBSPARSE_CACHE_DIR", str(tmp_path))
    return tmp_path / "kernels"


INTEGERS = types.int64(types.int64)


def double(signature=INTEGERS, module="numbsparse.kernels.cores", **how):
    """A kernel, defined anew as in another process."""

    def kernel(n):
        return n + n

    kernel.__module__ = module
    return cores.compiled(signature, **how)(kernel)


def was_loaded(kernel):
    return bool(kernel.stats.cache_hits)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(name, content) of the file of `double()`, which is compiled once for all that need it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("NUMBSPARSE_CACHE_DIR", str(tmp_path_factory.mktemp("made")))
        double()
        (file,) = (files.cache_folder() / "kernels").iterdir()
        return file.name, file.read_bytes()


@pytest.fixture
def kept_there(folder, made):
    """A folder with that file."""
    folder.mkdir(mode=0o700)
    (folder / made[0]).write_bytes(made[1])
    return folder


@pytest.mark.parametrize("module", ["numbsparse.kernels.cores", __name__])
def test_a_kernel_is_compiled_once(folder, module):
    first, again = (double(module=module) for _ in range(2))
    assert (first(21), again(21)) == (42, 42)
    assert [was_loaded(first), was_loaded(again)] == [False, True]
    assert not was_loaded(double(module=module, fastmath={"contract"}))
    assert not was_loaded(double(types.int32(types.int32), module))


def test_a_kernel_of_any_signature_is_compiled_once_for_each(folder):
    for loaded in (False, True):
        kernel = double(None)
        assert (kernel(21), kernel(2.5)) == (42, 5.0)
        assert sum(kernel.stats.cache_hits.values()) == 2 * loaded
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data[:-9] + bytes([data[-9] ^ 4]) + data[-8:],
        lambda data: b"junk",
        lambda data: kept.seal(b"junk"),
        lambda data: kept.seal(pickle.dumps((1, 2))),
    ],
    ids=["empty", "cut", "flipped", "junk", "sealed junk", "another pickle"],
)
def test_a_damaged_file_is_made_anew(kept_there, damage):
    (file,) = kept_there.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert double()(21) == 42
    assert was_loaded(double())


def no_home():
    raise RuntimeError("Could not determine home directory.")


def full(path, data):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("case", ["no folder", "no home", "full disk"])
def test_a_disk_that_takes_nothing_costs_nothing_but_time(folder, monkeypatch, case):
    if case == "no folder":
        folder.write_text("a file, where a folder is expected")
    elif case == "no home":
        for name in ("NUMBSPARSE_CACHE_DIR", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(files.Path, "home", no_home)
    else:
        monkeypatch.setattr(kept, "write_bytes", full)
    for _ in range(2):
        kernel = double()
        assert kernel(21) == 42
        assert not was_loaded(kernel)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="folders have no owners here")
class TestTheFolder:
    def test_is_made_for_one_user(self, folder):
        double()
        assert folder.stat().st_mode & 0o777 == 0o700

    def test_that_others_only_read_is_closed(self, kept_there):
        kept_there.chmod(0o755)
        assert was_loaded(double())
        assert kept_there.stat().st_mode & 0o777 == 0o700

    @pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
    def test_in_which_others_write_is_not_used(self, kept_there, mode, made):
        kept_there.chmod(mode)
        with pytest.warns(RuntimeWarning, match=f"{kept_there} takes a folder of user .* mode 700"):
            assert kept.read(made[0]) is None
        kernel = double()  # said once
        assert kernel(21) == 42
        assert not was_loaded(kernel)
        assert [(file.name, file.read_bytes()) for file in kept_there.iterdir()] == [made]

    @pytest.mark.usefixtures("kept_there")
    def test_of_another_user_is_not_used(self, monkeypatch):
        owner = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
        with pytest.warns(RuntimeWarning, match=f"got one of user {owner}"):
            assert kept.read("name.cpu") is None

    def test_that_is_a_link_is_not_used(self, kept_there, tmp_path):
        kept_there.rename(tmp_path / "elsewhere")
        kept_there.symlink_to(tmp_path / "elsewhere")
        with pytest.warns(RuntimeWarning, match="compiled kernels are not kept"):
            assert kept.read("name.cpu") is None


def test_what_a_kill_left_unfinished_goes_too(tmp_path):
    for i, name in enumerate([".a.cpu.0123", "b.cpu", "c.cubin"]):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (i, i))
    kept.trim(tmp_path, 200)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.cpu", "c.cubin"]
