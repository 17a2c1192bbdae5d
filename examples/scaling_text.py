"""Real text by the hundred million characters: what a machine carries, each passage once.

A machine with Python on it carries its packages' sources and documentation. They are read where
they lie and passed on to nobody: a manifest says how much was taken of what, and its hash whether
two machines had the same text.
"""

import hashlib
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from char_text import ENDINGS, PIECE, Text, open_text

PACKAGES = {"site-packages", "dist-packages"}
PASSED_OVER = {"__pycache__", "numbsparse"}  # the text is the same whether this is installed or not
LARGEST = 1_000_000  # bytes of a file; larger ones are tables that a program wrote
UNSEEN = b"0123456789 \t\n\r\f\v"  # in which passages may differ, and still be one
SHORT = 64  # characters of a passage, without those: shorter ones may come again
SHARES = 40  # of all files one such share is for validation, and one for the test
READERS = 8  # threads
PARTS = ("train", "validation", "test")

Manifest = dict[str, Any]


def gather(places: list[str]) -> tuple[Text, Manifest]:
    """The text of one file, or of all text files of folders; of the installed packages for none.

    ValueError where there is too little.
    """
    if len(places) == 1 and not Path(places[0]).is_dir():
        return of_one_file(places[0])
    return of_files(files_of([Path(place) for place in places] or installed()))


def installed() -> list[Path]:
    """The folders of this Python's packages, but for those of PYTHONPATH, and its own library's."""
    guests = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    packages = [path for path in sys.path if Path(path).name in PACKAGES and path not in guests]
    return [Path(path) for path in (*packages, sysconfig.get_path("stdlib"))]


def files_of(folders: Iterable[Path]) -> Iterator[tuple[str, Path]]:
    """Each text file once, with the package that it is of: the first folder on its way."""
    seen = set()
    for root in folders:
        if not root.is_dir():
            raise ValueError(f"--text takes one file, or folders, got {root}")
        for folder, inner, names in os.walk(root):
            inner[:] = [name for name in inner if name not in PASSED_OVER | PACKAGES]
            for name in names:
                path = Path(folder, name)
                if path.suffix in ENDINGS and path.is_file() and path not in seen:
                    seen.add(path)
                    yield (*path.relative_to(root).parts[:-1], root.name)[0], path


def of_one_file(place: str) -> tuple[Text, Manifest]:
    """enwik8 is split as usual; of another file the last twentieth, halved, is held out."""
    text = open_text(place)
    if text.test is None:
        validation, test = np.array_split(text.held_out, 2)
        text = replace(text, held_out=validation, test=test)
    return text, {"name": text.name} | totals(text)


def of_files(files: Iterable[tuple[str, Path]]) -> tuple[Text, Manifest]:
    """All files in the order of their hashes, which also say what part each is of."""
    once: dict[bytes, tuple[str, bytes]] = {}
    found, passages = sorted(files), Passages()
    with ThreadPoolExecutor(READERS) as readers:
        contents = readers.map(read, [path for _, path in found])
        for (package, _), (content, fault) in zip(found, contents, strict=True):
            key = hashlib.sha256(content).digest()
            fault = fault or ("copies of another file" if key in once else "")
            passages.left_out[fault] += bool(fault)
            if not fault:
                once[key] = package, content
    parts: dict[str, list[bytes]] = {part: [] for part in PARTS}
    taken: Counter[str] = Counter()
    for key in sorted(once):
        package, content = once.pop(key)
        content = passages.new_of(content)
        if content:
            parts[part_of(key)].append(content)
            taken[package] += len(content)
    whole = {part: np.frombuffer(b"".join(parts[part]), np.uint8) for part in PARTS}
    if not all(part.size for part in whole.values()):
        raise ValueError(f"--text takes folders with more text than {len(found)} files had")
    pieces = (p[i : i + PIECE] for p in whole.values() for i in range(0, p.size, PIECE))
    counts = sum(np.bincount(piece, minlength=256) for piece in pieces)
    text = Text("installed packages", bytes(np.flatnonzero(counts).tolist()), *whole.values())
    manifest = {
        "name": text.name,
        "files": {part: len(parts[part]) for part in PARTS} | {"found": len(found)},
        "left_out": dict(+passages.left_out),
        "packages": dict(taken.most_common(40)),
    }
    return text, manifest | totals(text)


def read(path: Path) -> tuple[bytes, str]:
    """A file's content, with line ends of one kind, and why it is left out, if it is."""
    if path.stat().st_size > LARGEST:
        return b"", "larger than a megabyte"
    content = path.read_bytes().replace(b"\r\n", b"\n")
    is_text = content.isascii() and b"\0" not in content
    return content, "" if is_text else "other than ASCII"


def part_of(key: bytes) -> str:
    share = int.from_bytes(key[:8], "big") % SHARES
    return {0: "validation", 1: "test"}.get(share, "train")


@dataclass
class Passages:
    """What was read so far. A passage ends at an empty line; digits and blanks make no difference.

    So licences, copied functions and files that were copied and changed a little come once, and
    nothing long that is held out is also learned from.
    """

    seen: set[bytes] = field(default_factory=set)
    left_out: Counter[str] = field(default_factory=Counter)

    def new_of(self, content: bytes) -> bytes:
        """What of a file is new; nothing of one that is mostly not."""
        kept, own, lost = [], set(), 0
        for passage in content.split(b"\n\n"):
            letters = passage.translate(None, UNSEEN)
            key = hashlib.blake2b(letters, digest_size=12).digest()
            if len(letters) < SHORT or (key not in self.seen and key not in own):
                kept.append(passage)
                own.add(key)
            else:
                lost += len(passage)
                self.left_out["repeated passages"] += 1
        if lost * 2 > len(content):
            self.left_out["mostly repeated"] += 1
            return b""
        self.seen |= own
        return b"\n\n".join(kept).strip(b"\n") + b"\n\n"


def totals(text: Text) -> Manifest:
    """Characters of each part, how many different, and the hash of all."""
    assert text.test is not None
    whole, parts = hashlib.sha256(), (text.train, text.held_out, text.test)
    for part in parts:
        whole.update(np.ascontiguousarray(part).data)
    characters = {name: int(part.size) for name, part in zip(PARTS, parts, strict=True)}
    symbols = len(text.alphabet)
    return {"characters": characters, "symbols": symbols, "sha256": whole.hexdigest()}
