"""examples/sentiment.py: its sources of labelled text, its classifier, and the whole of it."""

import gzip
import io
import json
import sysconfig
import tarfile
from pathlib import Path

import numpy as np
import pytest
from examples_helpers import SMALL_MODEL, imported

WORDS = {0: ("awful ", "dull ", "the plot "), 1: ("great ", "lovely ", "the plot ")}


@pytest.fixture
def sentiment(monkeypatch):
    return imported(monkeypatch, "sentiment")


@pytest.fixture
def labelled_text(monkeypatch):
    return imported(monkeypatch, "labelled_text")


def reviews(n, seed=0):
    """(text, label) pairs of words that tell the label."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(2, size=n)
    return [("".join(rng.choice(WORDS[label], rng.integers(4, 9))), label) for label in labels]


def write_imdb(folder):
    """aclImdb with 200 reviews to train, 60 to test and 40 without labels."""
    for part, n in (("train", 200), ("test", 60)):
        for i, (text, label) in enumerate(reviews(n, seed=n)):
            place = folder / "aclImdb" / part / ("neg", "pos")[label]
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{i}_7.txt").write_text(f"{text}<br /><br />{text}")
    (folder / "aclImdb" / "train" / "unsup").mkdir()
    for i in range(40):
        (folder / "aclImdb" / "train" / "unsup" / f"{i}_0.txt").write_text("unlabelled")
    return str(folder / "aclImdb")


def write_amazon(folder):
    """300 reviews, one in three without a label, in a file of JSON lines and in a packed one."""
    lines = []
    for i, (text, label) in enumerate(reviews(300)):
        stars = 3.0 if i % 3 == 0 else (1.0, 5.0)[label]
        lines.append(json.dumps({"reviewText": text, "overall": stars, "asin": "B0"}) + "\n")
    (folder / "amazon").mkdir()
    (folder / "amazon" / "books.json").write_text("".join(lines[:100]))
    with gzip.open(folder / "amazon" / "films.json.gz", "wt") as file:
        file.writelines(lines[100:])
    return str(folder / "amazon")


def tar(files):
    """An archive of these contents by name, packed."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def write_rated(folder):
    """200 texts with ratings, 40 neutral ones and a copy, in an archive in an archive."""
    lines = [f"{i}\t{4 * y - 2}\t{text}&amp;{i}\n" for i, (text, y) in enumerate(reviews(200))]
    lines += [f"n{i}\t{rating}\tneutral {i}\n" for i, rating in enumerate([0.5, -0.5] * 20)]
    parts = {"films": lines[:90], "tweets": lines[90:] + lines[:1]}
    rated = {f"{name}_GroundTruth.txt": "".join(part).encode() for name, part in parts.items()}
    inner = tar(rated | {"films_anonDataRatings.txt": b"1\t3\tno text\n"})
    path = folder / "vaderSentiment.tar.gz"
    path.write_bytes(tar({"v/setup.py": b"", "v/data.tar.gz": inner}))
    return str(path)


def test_rated_texts(labelled_text, tmp_path):
    data = labelled_text.read(write_rated(tmp_path), 1000, 1000, seed=0)
    labelled = data.train + data.test
    assert len(dict(labelled)) == len(labelled) == 200
    assert all(("great" in t) + ("lovely" in t) == 0 for t, label in labelled if not label)
    assert 20 < len(data.test) < 60
    lines = (data.text.train.tobytes() + data.text.held_out.tobytes()).decode().splitlines()
    assert len(lines) == 192  # four in five, neutral ones too
    assert not {text for text, _ in data.test} & set(lines)
    assert not any("&amp;" in line for line in lines)


def test_seeds_are_runs_of_their_own(sentiment, tmp_path, capsys):
    arguments = [*SMALL_MODEL, "--steps", "3", "--no-compare", "--seeds", "2"]
    arguments += ["--reviews", write_rated(tmp_path), f"--out={tmp_path / 'out'}"]
    means = sentiment.main(arguments)
    stored = json.loads((tmp_path / "out" / "sentiment.json").read_text())
    for name, value in means.items():
        assert value == np.mean([run[name] for run in stored["accuracy"]])
    assert stored["command"].endswith("--seeds 2 --reviews vaderSentiment.tar.gz")  # anywhere
    assert stored["accuracy"][0] != stored["accuracy"][1]
    assert all((tmp_path / "out" / f"seed-{seed}" / "sparse.npz").exists() for seed in (0, 1))
    assert "over 2 seeds" in capsys.readouterr().out
    said = [bits["sparse"] for bits in stored["bits"]]
    assert said[0] != said[1]
    assert min(said) > 0.5
    file, readme = tmp_path / "all.json", tmp_path / "README.md"
    other = {**stored, "command": "other", "lr": 1e-5, "bits": []}
    longer = {**other, "command": "longer", "steps": 4000, "lr": 1e-6}
    file.write_text(json.dumps([longer, other, {**stored, "lr": 5.0}]))  # the second was done again
    readme.write_text("<!-- features -->\n<!-- /features -->\n")
    sentiment.main(["--out", str(tmp_path / "out"), "--collect", str(file)])
    assert json.loads(file.read_text()) == [other, stored, longer]
    rows = [line.split(" | ") for line in readme.read_text().splitlines() if "| sparse" in line]
    assert [row[1] for row in rows] == ["3", "3", "4,000"]
    assert [row[2] for row in rows] == ["1e-05", f"{stored['lr']:g}", "1e-06"]
    assert rows[1][3] == f"{np.mean(said):.3f} ± {np.std(said, ddof=1):.3f}"
    assert [row[4] for row in rows] == [f"{means['sparse']:.1%} ± {spread(stored):.1%} |"] * 3


def spread(stored):
    return np.std([run["sparse"] for run in stored["accuracy"]], ddof=1)


def test_features_of_reviews_tell_what_they_say(sentiment, tmp_path, capsys):
    """The last state of a trained model, sparse or dense, says which words a review has."""
    arguments = [*SMALL_MODEL, "--steps", "40", "--train", "100", "--test", "50"]
    arguments += ["--reviews", write_imdb(tmp_path), "--out", str(tmp_path / "out")]
    accuracies = sentiment.main(arguments)
    assert sorted(accuracies) == ["byte counts", "dense", "majority", "sparse"]
    assert accuracies["majority"] < 0.7
    assert min(accuracies["sparse"], accuracies["dense"]) > 0.8
    assert "negative or positive" in capsys.readouterr().out


def test_by_default_comments_are_distinguished_from_docstrings(
    sentiment, tmp_path, capsys, monkeypatch
):
    a_part = Path(sysconfig.get_path("stdlib"), "asyncio")  # the whole is read below
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(a_part))
    arguments = [*SMALL_MODEL, "--steps", "5", "--train", "100", "--test", "40", "--no-compare"]
    accuracies = sentiment.main([*arguments, "--longest", "32", "--out", str(tmp_path)])
    assert sorted(accuracies) == ["byte counts", "majority", "sparse"]
    assert min(accuracies.values()) > 0.4
    printed = capsys.readouterr().out
    assert "text: the standard library's prose" in printed
    assert "question: comment or docstring; 100 to fit, 40 to test" in printed


def test_state_after_a_text_is_its_own(sentiment, tmp_path):
    """Whatever is read beside it, and whatever its length."""
    from char_text import ALL_BYTES, Text
    from char_training import Training

    options = sentiment.parse([*SMALL_MODEL, "--longest", "20"])
    letters = np.frombuffer(b"some text to learn from " * 9, np.uint8)
    text = Text("letters", ALL_BYTES, letters, letters)
    from char_model import sparse_model

    training = Training("sparse", sparse_model(256, options)[0], text, options)
    texts = ["a", "seven..", "eight...", "x" * 33, "y" * 13 + "x" * 20, "b", "c", "d", "e"]
    together = sentiment.final_states(training, texts)
    assert together.shape == (9, 64)
    for i, one in enumerate(texts):
        np.testing.assert_array_equal(sentiment.final_states(training, [one])[0], together[i])
    np.testing.assert_array_equal(together[3], together[4])  # the last 20 bytes are the same
    assert len(np.unique(together, axis=0)) == 8
    state = training.model.zero_state(1)
    codes = np.frombuffer(b"\nseven..", np.uint8).astype(np.int32)[:, None]
    _, state = training.model.read(codes, state)
    np.testing.assert_allclose(np.tanh(state[1].numpy()[0, 0]), together[1], rtol=1e-5, atol=1e-6)


def test_imdb(labelled_text, tmp_path):
    data = labelled_text.read(write_imdb(tmp_path), 50, 1000, seed=0)
    assert len(data.train) == 50
    assert len(data.test) == 60
    assert all(
        ("great" in text) + ("lovely" in text) == 0 for text, label in data.test if not label
    )
    assert not any("<br" in text or "unlabelled" in text for text, _ in data.train)
    lines = (data.text.train.tobytes() + data.text.held_out.tobytes()).decode().splitlines()
    assert len(lines) == 240  # what is to test is not among them
    assert lines.count("unlabelled") == 40
    again = labelled_text.read(str(tmp_path / "aclImdb"), 50, 1000, seed=0)
    assert again.train == data.train


def test_amazon(labelled_text, tmp_path):
    data = labelled_text.read(write_amazon(tmp_path), 1000, 1000, seed=0)
    assert len(data.train) + len(data.test) == 200  # three stars say neither
    assert 10 <= len(data.test) <= 30
    assert all(label == 0 for text, label in data.train if "awful" in text)


def test_the_standard_library_is_divided_by_file(labelled_text, monkeypatch):
    """Of one package of it, which is quicker to read."""
    package = Path(sysconfig.get_path("stdlib")) / "unittest"
    monkeypatch.setattr(labelled_text.sysconfig, "get_path", lambda name: str(package))
    data = labelled_text.read(None, 10**6, 10**6, seed=0)
    train, test = ({text for text, _ in part} for part in (data.train, data.test))
    assert not train & test
    assert len(train) > 3 * len(test) > 90
    assert 0.2 < np.mean([label for _, label in data.test]) < 0.8
    assert all(">>>" not in text for text, label in data.train if label)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "takes aclImdb, .* a file of JSON lines"),
        ("{]", r"r.json, line 1: no JSON"),
        ("[1]", "line 1: takes an object with reviewText and overall"),
        ('{"reviewText": "good", "overall": 5}', "of one class, or nothing"),
        ('{"reviewText": "good", "overall": "many"}', "line 1: overall takes a number, got 'many'"),
    ],
    ids=["missing", "no JSON", "no object", "one class", "no stars"],
)
def test_sentiment_refuses_reviews(sentiment, tmp_path, content, says):
    path = tmp_path / "r.json"
    if content is not None:
        path.write_text(content + "\n")
    with pytest.raises(SystemExit, match=f"sentiment: .*{says}"):
        sentiment.main([*SMALL_MODEL, "--reviews", str(path), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "content",
    [b"text", tar({"setup.py": b""}), tar({"a_GroundTruth.txt": b"no tabs"})],
    ids=["no archive", "nothing rated", "no ratings"],
)
def test_an_archive_without_ratings_is_refused(sentiment, tmp_path, content):
    path = tmp_path / "v.tar.gz"
    path.write_bytes(content)
    with pytest.raises(SystemExit, match=r"sentiment: .*(cannot be read|of one class)"):
        sentiment.main([*SMALL_MODEL, "--reviews", str(path), "--out", str(tmp_path / "out")])


@pytest.mark.parametrize("broken", [lambda data: b"text", lambda data: data[:-20]])
def test_a_broken_gzip_is_refused(sentiment, tmp_path, broken):
    path = tmp_path / "r.json.gz"
    path.write_bytes(broken(gzip.compress(b'{"reviewText": "good", "overall": 5}\n' * 9)))
    with pytest.raises(SystemExit, match=r"sentiment: .*r\.json\.gz cannot be read"):
        sentiment.main([*SMALL_MODEL, "--reviews", str(path), "--out", str(tmp_path / "out")])


def test_logistic_regression_is_at_its_minimum(monkeypatch):
    """The gradient of the stated loss is zero there, by central differences."""
    linear_classifier = imported(monkeypatch, "linear_classifier")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, 5)) * [1, 10, 0.1, 1, 1] + 3
    labels = (x[:, 0] + rng.standard_normal(200) > 3).astype(int)
    classifier = linear_classifier.LinearClassifier().fit(x, labels, 0.1)
    standard, sign = (x - x.mean(0)) / x.std(0), 2 * labels - 1

    def loss(step):
        weight, bias = classifier.weight + step[:5], classifier.bias + step[5]
        margin = sign * (standard @ weight + bias)
        return np.log1p(np.exp(-margin)).mean() + 0.05 * weight @ weight

    for direction in np.eye(6):
        slope = (loss(1e-4 * direction) - loss(-1e-4 * direction)) / 2e-4
        assert abs(slope) < 1e-4
    assert 0.7 < classifier.accuracy(x, labels) < 0.95


def test_the_penalty_is_chosen_on_examples_set_aside(monkeypatch):
    """Among 300 features one has to do with the label: small penalties would learn the noise."""
    linear_classifier = imported(monkeypatch, "linear_classifier")
    rng = np.random.default_rng(0)
    x, test = rng.standard_normal((2, 250, 300))
    labels, test_labels = ((part[:, 0] > 0).astype(int) for part in (x, test))
    chosen = linear_classifier.fit_best(x, labels).accuracy(test, test_labels)
    loose = linear_classifier.LinearClassifier().fit(x, labels, 1e-4).accuracy(test, test_labels)
    assert chosen >= loose
    assert chosen > 0.6
