"""Text for char_lm.py as it is on disk: mapped, counted in pieces, and never read whole."""

import hashlib
import sysconfig
import tempfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO

import numpy as np

HELD_OUT_EVERY = 20  # one file in twenty, or the last twentieth of one file, is never trained on
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
ENDINGS = {".py", ".txt", ".md", ".rst"}  # what is taken of a folder
USUAL = 100_000_000  # bytes of enwik8 and of text8
USUAL_SPLIT = (90_000_000, 95_000_000)  # training up to here, held out up to there, then the test
PIECE = 1 << 20  # bytes in memory at a time
ALL_BYTES = bytes(range(256))


@dataclass
class Text:
    """Parts of a text, uint8 bytes, and the alphabet: the bytes whose positions are the codes."""

    name: str
    alphabet: bytes
    train: np.ndarray
    held_out: np.ndarray
    test: np.ndarray | None = None

    @cached_property
    def code_of(self) -> np.ndarray:
        """(256,): the position in the alphabet of each byte."""
        table = np.zeros(256, np.int32)
        table[list(self.alphabet)] = np.arange(len(self.alphabet))
        return table

    @property
    def identity(self) -> str:
        """What tells this text from others, without reading it: name, sizes, both ends' sums."""
        ends = [zlib.crc32(part.tobytes()) for part in (self.train[:PIECE], self.held_out[-PIECE:])]
        return f"{self.name}: {self.train.size} + {self.held_out.size} bytes, sums {ends}"

    def encode(self, text: str) -> list[int]:
        """Codes of a short text; ValueError where it has bytes outside the alphabet."""
        code = text.encode(errors="surrogateescape")  # an argument may hold any bytes
        strangers = set(code) - set(self.alphabet)
        if strangers:
            raise ValueError(
                f"{text!r} holds {bytes(sorted(strangers))!r}, outside the vocabulary of "
                f"{len(self.alphabet)} bytes that {self.name} has"
            )
        return [int(self.code_of[byte]) for byte in code]

    def decode(self, codes: list[int]) -> str:
        return bytes(self.alphabet[code] for code in codes).decode(errors="replace")


class Streams:
    """A part of a text as `batch` pieces side by side, read `length` characters at a time.

    Step after step goes on in each piece where the step before ended, so that a state can be
    carried along; after the last of `n_steps` the text begins anew. `rows` are the pieces that are
    read here, of `batch`.
    """

    def __init__(
        self,
        part: np.ndarray,
        code_of: np.ndarray,
        batch: int,
        length: int,
        rows: slice = slice(None),
    ):
        size = part.size // batch
        self.pieces = part[: size * batch].reshape(batch, size)[rows]  # a view: nothing is read yet
        self.code_of, self.length = code_of, length
        self.n_steps = (size - 1) // length

    def at(self, step: int) -> tuple[np.ndarray, np.ndarray, bool]:
        """Codes and their successors, (length, batch) int32, and whether the text begins anew."""
        start = step % self.n_steps * self.length
        codes = self.code_of[self.pieces[:, start : start + self.length + 1].T]
        return codes[:-1], codes[1:], start == 0


def open_text(path: str | None, alphabet: str = "occurring") -> Text:
    """The standard library's sources for None, else a file or the text files of a folder.

    `alphabet` is "occurring", the bytes that the text has, which reads it once, or "bytes", all.
    """
    if path is None:
        return standard_library(alphabet)
    place = Path(path)
    if place.is_dir():
        files = [file for file in place.rglob("*") if file.suffix in ENDINGS and file.is_file()]
        return files_text(f"{place.resolve().name}'s", files, alphabet)
    return file_text(place, alphabet)


def standard_library(alphabet: str = "occurring") -> Text:
    """The sources of Python's standard library, by path; every twentieth file is held out."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [f for f in root.rglob("*.py") if not SKIPPED & set(f.relative_to(root).parts)]
    return files_text("the standard library's", files, alphabet)


def files_text(whose: str, files: Iterable[Path], alphabet: str = "occurring") -> Text:
    """Many files by path, each content once; every twentieth is held out."""
    once = {hashlib.sha1(file.read_bytes()).digest(): file for file in sorted(files, reverse=True)}
    chosen = sorted(once.values())
    name = f"{whose} {len(chosen)} files"
    if len(chosen) < 2:
        raise ValueError(f"--text takes a folder with at least 2 text files, got {name}")
    train = joined(file.read_bytes() for i, file in enumerate(chosen) if i % HELD_OUT_EVERY)
    held_out = joined(file.read_bytes() for file in chosen[::HELD_OUT_EVERY])
    return Text(name, _alphabet(name, alphabet, train, held_out), train, held_out)


def file_text(file: Path, alphabet: str = "occurring") -> Text:
    """Any text file. enwik8 and text8 are split as usual; else the last twentieth is held out."""
    if not file.is_file():
        raise ValueError(f"--text takes a file or a folder, got {file}: there is none")
    size = file.stat().st_size
    if not size:
        raise ValueError(f"--text takes a text, got {file}: it is empty")
    content = np.asarray(np.memmap(file, np.uint8, "r"))
    symbols = _alphabet(str(file), alphabet, content)
    if size == USUAL:
        train, held_out, test = np.split(content, USUAL_SPLIT)
        return Text(file.name, symbols, train, held_out, test)
    train, held_out = np.split(content, [size - size // HELD_OUT_EVERY])
    return Text(file.name, symbols, train, held_out)


def joined(contents: Iterable[bytes]) -> np.ndarray:
    """Contents one after the other, in a nameless file on disk that is gone when it is let go."""
    with tempfile.TemporaryFile() as file:
        file.writelines(contents)
        return mapped(file)


def mapped(file: IO[bytes]) -> np.ndarray:
    """The bytes that were written to a file, read as they are needed; it may be closed."""
    file.flush()
    return np.asarray(np.memmap(file, np.uint8, "r")) if file.tell() else np.empty(0, np.uint8)


def check_length(text: Text, batch: int, length: int) -> None:
    """Refuse a text that is too short for one step of training or of evaluation."""
    least = batch * (length + 1)
    parts = {"training": text.train, "held-out": text.held_out, "test": text.test}
    for part, content in parts.items():
        if content is not None and content.size < least:
            raise ValueError(
                f"the {part} text has {content.size} characters; "
                f"--batch {batch} and --length {length} take at least {least}"
            )


def _alphabet(name: str, which: str, *parts: np.ndarray) -> bytes:
    if which == "bytes":
        return ALL_BYTES
    counts = np.zeros(256, np.int64)
    for part in parts:
        for first in range(0, part.size, PIECE):
            counts += np.bincount(part[first : first + PIECE], minlength=256)
    if counts[0]:
        raise ValueError(f"--text takes a text, got {name}: it holds zero bytes, as binaries do")
    return bytes(np.flatnonzero(counts).tolist())
