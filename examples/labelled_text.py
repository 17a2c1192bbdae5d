"""Labelled text for sentiment.py: rated texts, IMDB's reviews, Amazon's, or Python's own prose.

Each source yields (part, label, text): part "train" or "test", label 0, 1 or None, one at a time.
What is trained on, labelled or not, becomes the language model's text, on disk.
"""

import ast
import gzip
import html
import io
import json
import random
import re
import sysconfig
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from char_text import ALL_BYTES, HELD_OUT_EVERY, SKIPPED, Text, mapped

Example = tuple[str, "int | None", str]
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

TEST_EVERY = 5  # of the standard library's files
AMAZON_TEST_EVERY = 10  # of the reviews
RATED_TEST_EVERY = 5  # of the texts
NEUTRAL = 0.5  # a mean rating up to here, of -4 to 4, has no label
SHORTEST = 40  # characters of a comment or docstring


@dataclass
class Labelled:
    """Two classes of texts, and what a language model may read of them."""

    classes: tuple[str, str]
    train: list[tuple[str, int]]
    test: list[tuple[str, int]]
    text: Text


def read(path: str | None, n_train: int, n_test: int, seed: int) -> Labelled:
    """At most so many examples of each part, drawn with the seed, and all training text."""
    rng = random.Random(seed)
    name, classes, source = find(path, rng)
    chosen = {"train": Reservoir(n_train, rng), "test": Reservoir(n_test, rng)}
    with tempfile.TemporaryFile() as train, tempfile.TemporaryFile() as held_out:
        n_read = 0
        for part, label, example in source:
            if label is not None:
                chosen[part].add((example, label))
            if part == "train":
                n_read += 1
                (train if n_read % HELD_OUT_EVERY else held_out).write(example.encode() + b"\n")
        text = Text(name, ALL_BYTES, mapped(train), mapped(held_out))
    for part, reservoir in chosen.items():
        if len({label for _, label in reservoir.items}) < 2:
            raise ValueError(f"{name}: what there is to {part} with is of one class, or nothing")
    return Labelled(classes, chosen["train"].items, chosen["test"].items, text)


def find(path: str | None, rng: random.Random) -> tuple[str, tuple[str, str], Iterator[Example]]:
    """What lies at a path: its name, its classes, and its examples."""
    if path is None:
        return "the standard library's prose", ("comment", "docstring"), standard_library()
    place, sentiment = Path(path), ("negative", "positive")
    if (place / "train" / "pos").is_dir():
        return "IMDB's reviews", sentiment, imdb(place, rng)
    if place.name.endswith(".tar.gz"):
        return "vaderSentiment's rated texts", sentiment, rated(place, rng)
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    files = [f for f in files if {".json", ".jsonl"} & set(f.suffixes) and f.is_file()]
    if not files:
        raise ValueError(
            f"--reviews takes aclImdb, vaderSentiment's source archive (.tar.gz), a file of JSON "
            f"lines (.json, .jsonl, also with .gz) or a folder of those, got {path}"
        )
    return f"Amazon's reviews in {place.name}", sentiment, amazon(files)


def rated(archive: Path, rng: random.Random) -> Iterator[Example]:
    """Snippets of film and product reviews, tweets and editorials, each rated by twenty people.

    They are in the source archive of the package vaderSentiment (MIT licence), as lines of number,
    mean rating and text. Hutto and Gilbert, "VADER: A Parsimonious Rule-based Model for Sentiment
    Analysis of Social Media Text", 2014. Each text comes once, in a drawn order.
    """
    texts: dict[str, float] = {}
    try:
        for line in ground_truth(io.BytesIO(archive.read_bytes())):
            _, mean, text = line.split("\t", 2)
            texts.setdefault(one_line(html.unescape(text)), float(mean))
    except (OSError, EOFError, ValueError, tarfile.TarError, zlib.error) as error:
        raise ValueError(f"{archive} cannot be read: {error}") from error
    drawn = sorted(texts.items())
    rng.shuffle(drawn)
    for i, (text, rating) in enumerate(drawn):
        part = "train" if i % RATED_TEST_EVERY else "test"
        yield part, None if abs(rating) <= NEUTRAL else int(rating > 0), text


def ground_truth(archive: IO[bytes]) -> Iterator[str]:
    """The lines of all *_GroundTruth.txt in an archive, and in archives that it holds."""
    with tarfile.open(fileobj=archive) as files:
        for member in files:
            content = files.extractfile(member)
            if content is None:
                continue
            if member.name.endswith(".tar.gz"):
                yield from ground_truth(io.BytesIO(content.read()))
            elif member.name.endswith("_GroundTruth.txt"):
                yield from filter(None, content.read().decode("utf-8", "replace").split("\n"))


def imdb(folder: Path, rng: random.Random) -> Iterator[Example]:
    """aclImdb: {train,test}/{pos,neg}/*.txt, and train/unsup if it is there, in a drawn order.

    Maas et al., "Learning Word Vectors for Sentiment Analysis", 2011.
    """
    labels = {"neg": 0, "pos": 1, "unsup": None}
    files = sorted(file for name in labels for file in folder.glob(f"*/{name}/*.txt"))
    rng.shuffle(files)
    for file in files:
        part, name = file.parts[-3:-1]
        if part in ("train", "test"):
            yield part, labels[name], one_line(file.read_text("utf-8", "replace"))


def amazon(files: list[Path]) -> Iterator[Example]:
    """JSON lines with reviewText and overall (or text and rating); 3 stars have no label.

    McAuley et al., "Image-Based Recommendations on Styles and Substitutes", 2015, and its
    successors. One review in ten is for the test.
    """
    n = 0
    for file in files:
        for number, line in enumerate(lines_of(file), 1):
            text, stars = parsed(line, f"{file}, line {number}")
            if text:
                n += 1
                part = "train" if n % AMAZON_TEST_EVERY else "test"
                yield part, None if 2 < stars < 4 else int(stars >= 4), text


def lines_of(file: Path) -> Iterator[str]:
    """Lines of a text file, compressed or not; ValueError where it is broken off or no gzip."""
    opened = gzip.open if file.suffix == ".gz" else open
    try:
        with opened(file, "rt", encoding="utf-8", errors="replace") as lines:
            yield from lines
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error


def parsed(line: str, where: str) -> tuple[str, float]:
    try:
        review = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: no JSON: {error}") from error
    if not isinstance(review, dict):
        raise ValueError(f"{where}: takes an object with reviewText and overall, got {line[:40]!r}")
    text = one_line(str(review.get("reviewText") or review.get("text") or ""))
    stars = review.get("overall", review.get("rating", 3))
    if not isinstance(stars, int | float):
        raise ValueError(f"{where}: overall takes a number, got {stars!r}")
    return text, stars


def standard_library() -> Iterator[Example]:
    """Paragraphs of comments (0) and of docstrings (1), each once, without marks and layout.

    Both are English about the same code, so that only the wording tells them apart. Every fifth
    file is for the test.
    """
    root, seen = Path(sysconfig.get_path("stdlib")), set()
    files = [f for f in root.rglob("*.py") if not SKIPPED & set(f.relative_to(root).parts)]
    for i, file in enumerate(sorted(files)):
        source = file.read_text("utf-8", "replace")
        for label, texts in enumerate((comments(source), docstrings(source))):
            for text in texts:
                if len(text) >= SHORTEST and text not in seen:
                    seen.add(text)
                    yield "train" if i % TEST_EVERY else "test", label, text


def comments(source: str) -> Iterator[str]:
    """Lines that hold nothing else, joined to paragraphs, which an empty comment ends too."""
    lines: list[str] = []
    for line in [*source.splitlines(), ""]:
        found = re.match(r"\s*#+(.*[A-Za-z].*)", line)
        if found:
            lines.append(found[1])
        elif lines:
            yield prose(" ".join(lines))
            lines = []


def docstrings(source: str) -> Iterator[str]:
    """Paragraphs of the docstrings of a module, its classes and functions, without examples."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # of another Python's, in a few of its own tests' files
        return
    for node in documented(tree):
        for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
            if ">>>" not in paragraph:
                yield prose(paragraph)


def documented(node: Documented) -> Iterator[Documented]:
    """A module, class or function, and those that are defined in it."""
    yield node
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from documented(child)


def prose(text: str) -> str:
    """One line without rulers such as ----."""
    return one_line(re.sub(r"[-=#*~_+]{3,}", " ", text))


def one_line(text: str) -> str:
    return " ".join(text.replace("<br />", " ").split())


class Reservoir:
    """`most` of all that is added, each as likely as any other: Vitter's algorithm R, 1985."""

    def __init__(self, most: int, rng: random.Random):
        self.most, self.rng, self.seen = most, rng, 0
        self.items: list[tuple[str, int]] = []

    def add(self, item: tuple[str, int]) -> None:
        self.seen += 1
        if len(self.items) < self.most:
            self.items.append(item)
        elif (place := self.rng.randrange(self.seen)) < self.most:
            self.items[place] = item
