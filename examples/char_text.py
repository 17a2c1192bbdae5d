"""Text for char_lm.py: the standard library's own sources, or any file, as streams of bytes."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HELD_OUT_EVERY = 20  # one file in twenty, or the last twentieth of one file, is never trained on
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass
class Text:
    """A text in numbers: `train` and `held_out` are uint8 positions in `alphabet`."""

    name: str
    alphabet: bytes
    train: np.ndarray
    held_out: np.ndarray

    def decode(self, codes: list[int]) -> str:
        return bytes(self.alphabet[code] for code in codes).decode(errors="replace")


def standard_library() -> Text:
    """The sources of Python's standard library, by path; every twentieth file is held out."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        path for path in root.rglob("*.py") if not SKIPPED & set(path.relative_to(root).parts)
    )
    held_out = b"".join(path.read_bytes() for path in files[::HELD_OUT_EVERY])
    train = b"".join(path.read_bytes() for i, path in enumerate(files) if i % HELD_OUT_EVERY)
    return _encode(f"the standard library's {len(files)} source files", train, held_out)


def file_text(path: str) -> Text:
    """Any text file, enwik8 or text8 among them; its last twentieth is held out."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"--text takes a file, got {path}: there is none")
    content = file.read_bytes()
    if not content:
        raise ValueError(f"--text takes a text, got {path}: it is empty")
    if b"\0" in content:
        raise ValueError(f"--text takes a text, got {path}: it holds zero bytes, as binaries do")
    cut = len(content) - len(content) // HELD_OUT_EVERY
    return _encode(file.name, content[:cut], content[cut:])


def streams(codes: np.ndarray, batch: int) -> np.ndarray:
    """The text as `batch` pieces of equal length side by side: (length, batch)."""
    length = len(codes) // batch
    return np.ascontiguousarray(codes[: length * batch].reshape(batch, length).T)


def check_length(text: Text, batch: int, length: int) -> None:
    """Refuse a text that is too short for one step of training or of evaluation."""
    least = batch * (length + 1)
    for part, codes in (("training", text.train), ("held-out", text.held_out)):
        if len(codes) < least:
            raise ValueError(
                f"the {part} text has {len(codes)} characters; "
                f"--batch {batch} and --length {length} take at least {least}"
            )


def _encode(name: str, train: bytes, held_out: bytes) -> Text:
    """Bytes as positions in the alphabet of all bytes that occur."""
    alphabet = bytes(sorted(set(train) | set(held_out)))
    code_of = np.zeros(256, np.uint8)
    code_of[list(alphabet)] = np.arange(len(alphabet))
    to_codes = [code_of[np.frombuffer(part, np.uint8)] for part in (train, held_out)]
    return Text(name, alphabet, *to_codes)
