"""A kernel that takes long to compile is named on a terminal, and nowhere else."""

import io
import re
import sys
import time

import pytest
from numba import types

from numbsparse.device import waits
from numbsparse.kernels import cores


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def on_terminal(monkeypatch, tmp_path):
    """To be called in the test: before it, pytest puts its own stderr there."""
    monkeypatch.setenv("NUMBSPARSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(waits, "PATIENCE", 0.0)

    def begin():
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        return terminal

    return begin


def wait_for(terminal):
    end = time.monotonic() + 10
    while not terminal.getvalue():
        assert time.monotonic() < end
        time.sleep(0.001)


def compile_one():
    def of_some_name(n):
        return n + n

    of_some_name.__module__ = "numbsparse.kernels.cores"
    return cores.compiled(types.int64(types.int64))(of_some_name)


LINE = r"numbsparse: compiling cores\.compile_one\.of_some_name, once for this machine \.\.\. "


def test_a_kernel_is_named_with_its_time(on_terminal, capsys):
    terminal = on_terminal()
    assert compile_one()(21) == 42
    assert re.fullmatch(LINE + r"\d+\.\d s\n", terminal.getvalue())
    compile_one()  # from disk
    assert terminal.getvalue().count("\n") == 1
    assert capsys.readouterr().out == ""


def test_nothing_is_said_where_nobody_waits(on_terminal, monkeypatch):
    terminal = on_terminal()
    for stream in (io.StringIO(), None):
        monkeypatch.setattr(sys, "stderr", stream)
        with waits.said(compile_one):
            pass
        assert stream is None or stream.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(waits, "PATIENCE", 60.0)
    with waits.said(compile_one), waits.said(compile_one):
        pass
    assert terminal.getvalue() == ""


def test_patience_is_that_of_kernels_in_a_row(on_terminal, monkeypatch):
    """What compiled just before counts; what compiled long ago does not."""
    on_terminal()
    now = [100.0]
    given = []

    class Timer(waits.Timer):
        def __init__(self, seconds, function, args):
            given.append(seconds)
            super().__init__(60.0, function, args)

    monkeypatch.setattr(waits, "Timer", Timer)
    monkeypatch.setattr(waits, "_ended", float("-inf"))
    monkeypatch.setattr(waits, "PATIENCE", 2.0)
    monkeypatch.setattr(waits, "monotonic", lambda: now[0])
    for begin, took in ((100.0, 1.5), (101.75, 1.0), (102.8, 1.0), (105.0, 1.0)):
        now[0] = begin
        with waits.said(compile_one):
            now[0] += took
    assert given == [2.0, 0.25, 0.0, 2.0]


def test_a_kernel_within_another_is_not_named(on_terminal):
    terminal = on_terminal()
    with waits.said(compile_one):
        wait_for(terminal)
        with waits.said(waits.said):
            pass
    assert re.fullmatch(r".*compile_one, once .*\n", terminal.getvalue())


def test_a_failure_ends_the_line(on_terminal):
    terminal = on_terminal()

    def fail():
        with waits.said(compile_one):
            wait_for(terminal)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert terminal.getvalue().endswith(" s\n")
    compile_one()  # the next is named again
    assert terminal.getvalue().count("\n") == 2


@pytest.mark.parametrize(("patience", "seen"), [(0.0, True), (60.0, False)])
def test_a_bar_is_shown_of_what_takes_long(on_terminal, monkeypatch, patience, seen):
    pytest.importorskip("tqdm")
    monkeypatch.setattr(waits, "PATIENCE", patience)
    terminal = on_terminal()
    assert list(waits.shown(["a", "b"], "spelling")) == ["a", "b"]
    assert ("spelling:" in terminal.getvalue()) == seen


@pytest.mark.parametrize(("patience", "seen"), [(-1.0, True), (60.0, False)])
def test_without_tqdm_the_steps_are_counted(on_terminal, monkeypatch, patience, seen):
    monkeypatch.setattr(waits, "PATIENCE", patience)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    terminal = on_terminal()
    assert list(waits.shown(["a", "b"], "spelling")) == ["a", "b"]
    lines = [f"numbsparse: spelling, {done} of 2" for done in range(2)]
    last = f"\r{' ' * len(lines[-1])}\r"  # nothing is left on the line
    assert terminal.getvalue() == (f"\r{lines[0]}\r{lines[1]}{last}" if seen else "")


def test_no_bar_is_shown_where_no_one_looks(monkeypatch):
    monkeypatch.setattr(waits, "PATIENCE", 0.0)
    monkeypatch.setattr(sys, "stderr", file := io.StringIO())
    assert list(waits.shown(range(3), "counting")) == [0, 1, 2]
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert waits.shown(range(3), "counting") == range(3)
    assert file.getvalue() == ""
