"""Texts of the examples: mapped from disk, split, and read as streams that go on."""

import os
import tracemalloc

import numpy as np
import pytest
from examples_helpers import imported, write_text


@pytest.fixture
def char_text(monkeypatch):
    return imported(monkeypatch, "char_text")


def test_the_standard_library_is_text(char_text):
    text, again = char_text.open_text(None), char_text.open_text(None)
    assert text.train.size > 10 * text.held_out.size > 1e6
    assert text.identity == again.identity
    assert (text.train == again.train).all()
    assert b"import " in text.train[:5000].tobytes()


def test_codes_and_text_are_one_another(char_text, tmp_path):
    text = char_text.open_text(write_text(tmp_path))
    assert text.alphabet == bytes(sorted(set(b"block sparse weights\n")))
    assert text.decode(text.encode("sparse block")) == "sparse block"
    assert (char_text.open_text(str(tmp_path / "text.txt"), "bytes")).decode([66, 67]) == "BC"


def test_streams_go_on_where_they_were(char_text):
    """Each column, step after step, is a stretch of the text, and targets are one ahead."""
    content = np.random.default_rng(0).integers(0, 256, 1003, dtype=np.uint8)
    streams = char_text.Streams(content, np.arange(256, dtype=np.int32), batch=5, length=8)
    assert streams.n_steps == 24  # pieces of 200, whose last character has no successor
    codes, targets, anew = zip(*(streams.at(step) for step in range(24)), strict=True)
    assert anew == (True, *[False] * 23)
    for row in range(5):
        piece = content[row * 200 : (row + 1) * 200]
        np.testing.assert_array_equal(np.concatenate(codes)[:, row], piece[:192])
        np.testing.assert_array_equal(np.concatenate(targets)[:, row], piece[1:193])
    assert streams.at(24)[2]
    np.testing.assert_array_equal(streams.at(25)[0], codes[1])


def test_a_text_larger_than_memory_is_mapped(char_text, tmp_path):
    """A file of 200 GB without contents but for its last bytes; a few windows of it are read."""
    size, path = 200 * 10**9, tmp_path / "large.txt"
    with open(path, "wb") as file:
        file.truncate(size)
        file.seek(size - 3)
        file.write(b"end")
    text = char_text.open_text(str(path), "bytes")
    assert text.train.size + text.held_out.size == size
    assert text.held_out[-3:].tobytes() == b"end"
    streams = char_text.Streams(text.train, text.code_of, batch=64, length=32)
    assert streams.at(streams.n_steps - 1)[0].shape == (32, 64)
    assert isinstance(text.identity, str)


def test_the_alphabet_is_counted_in_pieces(char_text, tmp_path):
    size, path = 24 << 20, tmp_path / "text.txt"
    with open(path, "wb") as file:
        file.writelines([b"block sparse\n" * (1 << 16)] * (size // (13 << 16)) + [b"!"])
    tracemalloc.start()
    try:
        text = char_text.open_text(str(path))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert text.alphabet == bytes(sorted(set(b"block sparse\n!")))
    assert peak < os.path.getsize(path) / 2


@pytest.mark.parametrize("name", ["enwik8", "text8"])
def test_enwik8_and_text8_are_split_as_usual(char_text, tmp_path, name):
    """By their size of 10^8 bytes: 90 million to train, 5 held out, 5 for the test."""
    path = tmp_path / name
    with open(path, "wb") as file:
        for position, mark in [(89_999_999, b"ab"), (94_999_999, b"cd"), (99_999_999, b"e")]:
            file.seek(position)
            file.write(mark)
    text = char_text.open_text(str(path), "bytes")
    ends = [(part[0], part[-1]) for part in (text.train, text.held_out, text.test)]
    assert ends == [(0, ord("a")), (ord("b"), ord("c")), (ord("d"), ord("e"))]
    assert [text.train.size, text.held_out.size, text.test.size] == [90 * 10**6] + [5 * 10**6] * 2


def test_a_folder_is_its_text_files_each_once(char_text, tmp_path):
    for i in range(40):
        write_text(tmp_path, f"{i}.py", words=(f"{i} ", "x\n"), n=9)
    write_text(tmp_path, "again.py", words=("7 ", "x\n"), n=9)
    (tmp_path / "picture.png").write_bytes(b"\0")
    text = char_text.open_text(str(tmp_path))
    assert "40 files" in text.name
    sizes = sum((tmp_path / f"{i}.py").stat().st_size for i in range(40))
    assert text.train.size + text.held_out.size == sizes
    assert text.held_out.size > 0


def test_a_folder_without_text_is_refused(char_text, tmp_path):
    with pytest.raises(ValueError, match="takes a folder with at least 2 text files"):
        char_text.open_text(str(tmp_path))
