"""Files are written whole, under names of their own, and stay as private as they were."""

import os
import re
import stat
import sys
import threading

import numpy as np
import pytest

import numbsparse as ns
from numbsparse import __main__ as command_line
from numbsparse import files

on_posix = pytest.mark.skipif(os.name != "posix", reason="permissions and links are of POSIX")


def test_two_threads_write_one_path(tmp_path):
    """Each has begun before the other ends; what stands there is always one of the two, whole."""
    path, both, failed = tmp_path / "file", threading.Barrier(2), []

    def write(letter):
        def in_two_parts(file):
            file.write(letter * 1000)
            both.wait(10)
            file.write(letter * 1000)
            both.wait(10)

        try:
            files.write_whole(path, in_two_parts)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(letter,)) for letter in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert path.read_bytes() in (b"a" * 2000, b"b" * 2000)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_many_threads_save_and_load_one_path(tmp_path):
    path, failed = tmp_path / "state.npz", []
    ns.save(path, {"x": np.zeros(100)})

    def work(number):
        try:
            for _ in range(8):
                ns.save(path, {"x": np.full(100, number)})
                assert len(set(ns.load(path)["x"])) == 1
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert [file.name for file in tmp_path.iterdir()] == ["state.npz"]


@on_posix
def test_a_planted_link_is_not_followed(tmp_path, monkeypatch):
    victim, folder = tmp_path / "victim", tmp_path / "folder"
    folder.mkdir()
    victim.write_text("untouched")
    (folder / f".w.{os.getpid()}").symlink_to(victim)
    files.write_bytes(folder / "w", b"new")
    assert (folder / "w").read_bytes() == b"new"
    # Not even where the name was guessed.
    monkeypatch.setattr(files, "token_hex", lambda n: "guessed")
    (folder / ".w.guessed").symlink_to(victim)
    with pytest.raises(FileExistsError, match=r"w'$"):
        files.write_bytes(folder / "w", b"newer")
    assert (folder / "w").read_bytes() == b"new"
    assert victim.read_text() == "untouched"


@on_posix
def test_a_link_stays_a_link_to_the_new_file(tmp_path):
    """As where checkpoints lie on a larger disk."""
    disk, here = tmp_path / "disk", tmp_path / "here"
    disk.mkdir()
    here.mkdir()
    for name in ("old.npz", "new.npz"):
        (here / name).symlink_to(disk / name)
    ns.save(disk / "old.npz", {"step": 1})
    (disk / "old.npz").chmod(0o600)
    for name in ("old.npz", "new.npz"):
        ns.save(here / name, {"step": 2})
        assert (here / name).is_symlink()
        assert ns.load(disk / name) == {"step": 2}
    assert stat.S_IMODE((disk / "old.npz").stat().st_mode) == 0o600
    assert sorted(os.listdir(disk)) == ["new.npz", "old.npz"]
    assert sorted(os.listdir(here)) == ["new.npz", "old.npz"]


@on_posix
def test_what_is_no_file_stays_what_it_is(tmp_path):
    """A pipe here; of /dev/null root would have made a file."""
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    ns.save(pipe, {"step": 2})
    reader.join(10)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    (tmp_path / "file.npz").write_bytes(read[0])
    assert ns.load(tmp_path / "file.npz") == {"step": 2}


def write_plainly(path):
    files.write_bytes(path, b"new")


def save_state(path):
    ns.save(path, {"x": 1})


def save_matrix(path):
    ns.BlockSparse(np.ones((1, 4, 4)), [[1]]).save(path)


def save_picture(path):
    drawing = ns.draw([[1]])
    drawing._render = lambda file_format: b"a picture"
    drawing.save(path)


@on_posix
@pytest.mark.parametrize("write", [write_plainly, save_state, save_matrix, save_picture])
def test_permissions_are_kept(tmp_path, write):
    before = os.umask(0o027)
    try:
        for mode in (0o600, 0o666, 0o640):
            path = tmp_path / f"{mode:o}.png"
            path.touch()
            path.chmod(mode)
            write(path)
            assert path.stat().st_size
            assert stat.S_IMODE(path.stat().st_mode) == mode
        write(tmp_path / "new.png")
        assert stat.S_IMODE((tmp_path / "new.png").stat().st_mode) == 0o640
    finally:
        os.umask(before)


@on_posix
def test_what_is_being_written_is_no_less_private(tmp_path):
    path, seen = tmp_path / "file", []
    path.touch(0o600)

    def write(file):
        seen.append(stat.S_IMODE(os.fstat(file.fileno()).st_mode))

    files.write_whole(path, write)
    assert seen == [0o600]


def test_what_cannot_be_written_is_known_before(tmp_path):
    beside = list(tmp_path.iterdir())
    files.check_writable(tmp_path / "new")
    files.check_writable(os.devnull)
    assert list(tmp_path.iterdir()) == beside
    (tmp_path / "link").symlink_to(tmp_path / "none" / "file")
    for path in (tmp_path / "none" / "file", tmp_path / "link"):
        with pytest.raises(FileNotFoundError, match=re.escape(f"{path}")):
            files.check_writable(path)
    with pytest.raises(IsADirectoryError, match=re.escape(f"{tmp_path}")):
        files.check_writable(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="a folder that not even root may write to")
@pytest.mark.parametrize(
    "command",
    [
        *("bench --json", "bench --place cuda --png", "profile --json", "trace k1_naive --svg"),
        *("machine-code --json", "times --json", "plane --json", "plane --png"),
    ],
)
def test_a_command_begins_only_what_it_can_write(command, capsys):
    with pytest.raises(SystemExit, match="2"):
        command_line.main([*command.split(), f"/proc/file.{command.split('--')[-1]}"])
    option = command.split()[-1]
    said = f"argument {option}: takes a file that can be written: [Errno"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["bench --place cuda", "plane --minutes 1"])
@pytest.mark.parametrize("name", ["picture", "picture.gif2", "png"])
def test_a_picture_has_a_form(command, name, tmp_path, capsys):
    """matplotlib would say it after the measuring."""
    with pytest.raises(SystemExit, match="2"):
        command_line.main([*command.split(), "--png", str(tmp_path / name)])
    assert "--png: takes a name ending in .png, .svg or .pdf, got" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="a folder that not even root may write to")
@pytest.mark.simulator
def test_a_trace_begins_only_in_a_folder_that_it_can_write(monkeypatch, capfd):
    """On a GPU another process says so, which has the simulator."""
    monkeypatch.chdir("/proc")
    monkeypatch.delattr("numbsparse.pages.trace.trace_of")
    with pytest.raises(SystemExit) as ended:
        command_line.main(["trace", "k1_naive"])
    said = f"{ended.value} {capfd.readouterr().err}"
    assert re.search(r"numbsparse: \[Errno .* 'k1_naive.svg'", said)


def test_a_folder_that_is_not_there_is_named_with_the_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere.file'$"):
        files.write_bytes(tmp_path / "nowhere" / "file", b"")
