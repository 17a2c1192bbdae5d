"""examples/scaling_text.py: texts of files and installed packages, nothing long in them twice."""

from itertools import chain

import numpy as np
import pytest
from examples_helpers import imported, write_text


@pytest.fixture
def texts(monkeypatch):
    return imported(monkeypatch, "scaling_text")


def passage(number, of="word"):
    """A passage that no other is like, longer than those that may come again."""
    letters = "".join(chr(97 + number // 26**i % 26) for i in range(3))
    return f"def {letters}(x):\n    return '{of * 20} {letters * 5}'  # {number}"


def write_files(folder, contents):
    folder.mkdir(parents=True, exist_ok=True)
    for i, content in enumerate(contents):
        (folder / f"{i}.py").write_bytes(
            content if isinstance(content, bytes) else content.encode()
        )


def test_the_text_is_all_files_by_their_hash(texts, tmp_path):
    write_files(tmp_path / "one" / "inner", [passage(i) for i in range(300)])
    write_files(tmp_path / "two", [passage(i) for i in range(300, 500)])
    text, manifest = texts.gather([str(tmp_path)])
    parts = dict(zip(texts.PARTS, (text.train, text.held_out, text.test), strict=True))
    found = {name: part.tobytes().decode().split("\n\n")[:-1] for name, part in parts.items()}
    assert sorted(chain(*found.values())) == sorted(passage(i) for i in range(500))
    assert manifest["files"] == {n: len(part) for n, part in found.items()} | {"found": 500}
    assert manifest["characters"] == {name: part.size for name, part in parts.items()}
    assert manifest["packages"].keys() == {"one", "two"}
    assert sum(manifest["packages"].values()) == sum(part.size for part in parts.values())
    assert len(found["train"]) > 440
    (tmp_path / "one").rename(tmp_path / "zoo")
    again, named = texts.gather([str(tmp_path)])
    assert (again.train == text.train).all()
    assert named["sha256"] == manifest["sha256"]
    (tmp_path / "two" / "0.py").write_text(passage(600))
    assert texts.gather([str(tmp_path)])[1]["sha256"] != manifest["sha256"]


def test_nothing_long_comes_twice(texts, tmp_path):
    many = [passage(i) for i in range(300)]
    short = "import numpy"
    changed = passage(7).replace("# 7", "# 2024").replace("    ", "\t\t")
    write_files(tmp_path / "a", many)
    write_files(tmp_path / "b", [
        f"{short}\n\n{passage(901)}\n\n{passage(902)}\n\n{changed}\n",  # a part of it is old
        f"{short}\n\n{passage(903)}\n\n{passage(904)}\n\n{passage(904)}",
        f"{passage(905)}\n\n{passage(3)}\n\n{passage(4)}",  # most of it
        passage(5) + "\r\n",
        passage(906) + "\N{SNOWMAN}",
        passage(907) + "\0",
        passage(908) + " " * texts.LARGEST,
        "",
    ])  # fmt: skip
    text, manifest = texts.gather([str(tmp_path)])
    everything = b"".join(part.tobytes() for part in (text.train, text.held_out, text.test))
    for number in [*range(300), 901, 902, 903, 904]:
        told = [everything.count(form.encode()) for form in (passage(number), changed)]
        assert told[0] + (number == 7) * told[1] == 1, number
    assert everything.count(b"import numpy") == 2
    for number in (906, 907, 908):
        assert passage(number).encode() not in everything
    left_out = manifest["left_out"]
    assert (left_out["other than ASCII"], left_out["larger than a megabyte"]) == (2, 1)
    assert left_out["mostly repeated"] >= 1  # passage 5 comes with two kinds of line ends
    assert manifest["symbols"] == len(set(everything)) == len(text.alphabet)


def test_a_file_is_split_at_its_end(texts, tmp_path):
    text, manifest = texts.gather([write_text(tmp_path)])
    whole = np.concatenate([text.train, text.held_out, text.test]).tobytes()
    assert whole == (tmp_path / "text.txt").read_bytes()
    assert abs(text.held_out.size - text.test.size) <= 1
    assert manifest["characters"]["train"] == text.train.size


def test_the_installed_packages_are_a_text(texts, monkeypatch, tmp_path):
    folders = texts.installed()
    assert folders[-1].name.startswith("python3")
    guest = tmp_path / "site-packages"
    monkeypatch.setattr("sys.path", ["/elsewhere", str(guest)])
    assert texts.installed()[:-1] == [guest]
    monkeypatch.setenv("PYTHONPATH", f"/other:{guest}")
    assert texts.installed()[:-1] == []


@pytest.mark.parametrize("what", ["missing", "empty", "one"])
def test_texts_are_refused(texts, tmp_path, what):
    folder = tmp_path / "folder"
    if what != "missing":
        write_files(folder, [passage(1)] * (what == "one"))
    with pytest.raises(ValueError, match="--text takes"):
        texts.gather([str(folder)] * (1 + (what == "missing")))
