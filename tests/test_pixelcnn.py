"""examples/pixelcnn.py learns, compares, resumes bit for bit, and refuses what it cannot use."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from examples_helpers import imported, same_arrays
from pixel_helpers import SMALL, options, write_cifar

import numbsparse as ns
from numbsparse import device


@pytest.fixture
def drawing(monkeypatch):
    return imported(monkeypatch, "pixelcnn")


@pytest.fixture
def pixelcnn(drawing, monkeypatch):
    """Without the curves, which take as long as such a training."""
    monkeypatch.setattr(drawing, "write_curves", lambda *of: None)
    return drawing


@pytest.fixture
def arguments(tmp_path):
    write_cifar(tmp_path / "cifar")
    return [*SMALL, "--data", str(tmp_path / "cifar"), "--out", str(tmp_path / "out")]


def test_pixelcnn_learns_and_leaves_its_results(drawing, arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.modules["pixel_sample"], "SIZE", 4)
    few = ["--steps", "8", "--mark-every", "4", "--lr", "0.02", "--stages", "2"]
    rows = drawing.main([*arguments, *few, "--compare", "--samples", "3"])
    assert [row["kind"] for row in rows] == ["sparse", "dense"]
    assert rows[0]["parameters"] == pytest.approx(rows[1]["parameters"], rel=0.02)
    out = tmp_path / "out"
    content = json.loads((out / "pixelcnn.json").read_text())
    assert content["command"].startswith("python examples/pixelcnn.py --filters 8")
    assert [run["kind"] for run in content["runs"]] == ["sparse", "dense"]
    for run in content["runs"]:
        held_out = [h for _, _, h in run["curve"] if h is not None]
        assert len(held_out) == 2
        assert held_out[-1] < held_out[0] - 0.3
        assert held_out[-1] == pytest.approx(run["bits"], abs=1e-4)  # of all the few held out
    for name in ("pixelcnn.png", "pixelcnn_samples.png"):
        assert (out / name).stat().st_size > 5000
    for name in ("sparse_0", "dense_0"):
        assert ns.load(out / f"{name}.npz")["step"] == 8
    assert "bits/dim held out" in capsys.readouterr().out


def test_each_seed_has_its_weights_and_each_kind_the_same_images(
    pixelcnn, arguments, tmp_path, monkeypatch
):
    seen = []

    def noted(training, batch, at=sys.modules["pixel_images"].Batches.at):
        seen.append(at(training, batch).sum())
        return at(training, batch)

    monkeypatch.setattr(sys.modules["pixel_images"].Batches, "at", noted)
    small = ["--steps", "1", "--compare", "--seeds", "2", "--no-checkpoints"]
    rows = pixelcnn.main([*arguments, *small])
    assert not list((tmp_path / "out").glob("*.npz"))
    assert [row["seeds"] for row in rows] == [2, 2]
    assert all(row["spread"] > 0 for row in rows)
    assert seen[0] == seen[1] != seen[2] == seen[3]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The bytes of one, of a training that is done."""
    folder = tmp_path_factory.mktemp("finished")
    write_cifar(folder)
    with pytest.MonkeyPatch.context() as patch:
        program = imported(patch, "pixelcnn")
        patch.setattr(program, "write_curves", lambda *of: None)
        program.main([*SMALL, "--data", str(folder), "--out", str(folder), "--steps", "2"])
    return (folder / "sparse_0.npz").read_bytes()


@pytest.fixture
def finished(checkpoint, tmp_path):
    """Where it is found, and its bytes."""
    file = tmp_path / "out" / "sparse_0.npz"
    file.parent.mkdir()
    file.write_bytes(checkpoint)
    return file, checkpoint


def test_an_interrupted_training_goes_on_bit_for_bit(pixelcnn, arguments, tmp_path, monkeypatch):
    training = sys.modules["pixel_training"].Training
    train_step = training.train_step

    def interrupted(self):
        if self.step == 1:
            raise KeyboardInterrupt
        return train_step(self)

    arguments += ["--dropout", "0.3", "--steps", "2", "--mark-every", "1"]
    elsewhere = [*arguments, "--out", str(tmp_path / "stopped")]
    monkeypatch.setattr(training, "train_step", interrupted)
    with pytest.raises(SystemExit, match="--resume goes on"):
        pixelcnn.main(elsewhere)
    monkeypatch.setattr(training, "train_step", train_step)
    file = tmp_path / "stopped" / "sparse_0.npz"
    assert ns.load(file)["step"] == 1
    pixelcnn.main([*elsewhere, "--resume"])
    pixelcnn.main(arguments)
    same_arrays(file, tmp_path / "out" / "sparse_0.npz")


OTHERS = [("filters", "16"), ("stages", "2"), ("mixtures", "3"), ("batch", "2"), ("average", "0")]


@pytest.mark.parametrize(("name", "value"), OTHERS, ids=[name for name, _ in OTHERS])
def test_a_checkpoint_of_another_shape_is_refused(pixelcnn, arguments, finished, name, value):
    file, before = finished
    with pytest.raises(SystemExit, match=rf"sparse_0\.npz was made with --{name} .*has {value}"):
        pixelcnn.main([*arguments, f"--{name}", value, "--resume"])
    assert file.read_bytes() == before


def test_a_checkpoint_of_other_images_is_refused(pixelcnn, arguments, finished, tmp_path):
    file, before = finished
    write_cifar(tmp_path / "cifar", seed=1)
    with pytest.raises(SystemExit, match=r"has seen CIFAR-10: .* this run has CIFAR-10: "):
        pixelcnn.main([*arguments, "--resume"])
    assert file.read_bytes() == before


@pytest.mark.parametrize("content", [b"half of a check", None], ids=["no file", "another program"])
def test_a_file_that_is_no_checkpoint_is_refused(pixelcnn, arguments, tmp_path, content):
    file = tmp_path / "out" / "sparse_0.npz"
    file.parent.mkdir()
    file.write_bytes(content) if content else ns.save(file, {"a": 1})
    with pytest.raises(SystemExit, match="is not a checkpoint"):
        pixelcnn.main([*arguments, "--resume"])


def test_a_diverging_training_stops_and_keeps_its_checkpoint(pixelcnn, arguments, finished):
    file, before = finished
    with np.errstate(all="ignore"), pytest.raises(SystemExit, match="loss is not finite") as stop:
        pixelcnn.main([*arguments, "--resume", "--steps", "20", "--lr", "1e38"])
    assert "take a lower --lr" in str(stop.value)
    assert f"{file} is as it was" in str(stop.value)
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("others", "says"),
    [
        (["--filters", "10"], "--filters takes whole blocks, a multiple of --block-size 4, got 10"),
        (["--stages", "7"], "--stages takes up to 6"),
        (["--batch", "99"], "--batch takes at most the 16 training images, got 99"),
        (["--deeper", "50"], "--deeper 50 and --wider 1 take a density of"),
        (["--dtype", "float16"], "--dtype float16 takes a GPU"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_sizes_are_refused(pixelcnn, arguments, others, says):
    with pytest.raises(SystemExit, match=says):
        pixelcnn.main([*arguments, *others])


WORDS = ["--steps 0", "--lr inf", "--dropout 1", "--average nan", "--samples -1", "--deeper 0"]


@pytest.mark.parametrize("words", WORDS)
def test_arguments_are_refused(pixelcnn, arguments, tmp_path, words):
    with pytest.raises(SystemExit):
        pixelcnn.main([*arguments, *words.split()])
    assert not (tmp_path / "out").exists()


def test_cifar_is_read_in_its_own_order(pixelcnn, tmp_path):
    written = write_cifar(tmp_path / "cifar-10-batches-bin")
    images = sys.modules["pixel_images"].open_images(str(tmp_path))
    expected = np.concatenate([written["data_batch_1"], written["data_batch_2"]])
    np.testing.assert_array_equal(images.train, expected.transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(images.held_out, written["test_batch"].transpose(0, 2, 3, 1))


def spoil(folder, name, content):
    (folder / name).write_bytes(content) if content is not None else (folder / name).unlink()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("data_batch_2.bin", b"x" * 3072, "data_batch_2.bin takes images of 3073 .* got 3072"),
        ("test_batch.bin", b"", "test_batch.bin takes images of 3073 bytes each, got 0"),
        ("test_batch.bin", None, "lacks test_batch.bin"),
    ],
    ids=["cut short", "empty", "missing"],
)
def test_files_that_are_not_cifar_are_refused(pixelcnn, arguments, tmp_path, name, content, says):
    spoil(tmp_path / "cifar", name, content)
    with pytest.raises(SystemExit, match=f"pixelcnn: .*{says}"):
        pixelcnn.main(arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("folder", ["nowhere", "empty"])
def test_folders_without_images_are_refused(pixelcnn, arguments, tmp_path, folder):
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="--data takes"):
        pixelcnn.main([*arguments, "--data", str(tmp_path / folder)])


def photos(height=427, width=640):
    """Two photographs in which every pixel is another number."""
    return np.arange(2 * height * width * 3, dtype=np.uint32).reshape(2, height, width, 3)


def test_held_out_patches_share_no_pixel_with_training_ones(pixelcnn):
    images = sys.modules["pixel_images"]
    train, held_out = (
        np.array([p for photo in photos(75, 340) for part in images.parts(photo, out)
                  for p in images.patches(part, step)])
        for out, step in ((False, 8), (True, 32))
    )  # fmt: skip
    assert train.shape[1:] == held_out.shape[1:] == (32, 32, 3)
    assert len(train) > 200
    assert len(np.unique(held_out)) == held_out.size  # nor with each other
    assert not np.intersect1d(train, held_out).size


def test_photographs_come_from_scikit_learn(pixelcnn, monkeypatch):
    given = SimpleNamespace(images=list(photos().astype(np.uint8)))
    stub = SimpleNamespace(load_sample_images=lambda: given)
    monkeypatch.setitem(sys.modules, "sklearn", SimpleNamespace(datasets=stub))
    monkeypatch.setitem(sys.modules, "sklearn.datasets", stub)
    images = sys.modules["pixel_images"].open_images(None)
    assert (len(images.train), len(images.held_out)) == (5500, 104)
    assert images.train.dtype == images.held_out.dtype == np.uint8


def test_without_scikit_learn_it_says_what_to_install(pixelcnn, arguments, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    at = arguments.index("--data")
    with pytest.raises(SystemExit, match="pip install scikit-learn"):
        pixelcnn.main(arguments[:at] + arguments[at + 2 :])


@pytest.mark.skipif(
    not device.is_available() or device.SIMULATED, reason="the simulator would take minutes"
)
@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_captured_step_is_an_eager_one_and_that_of_the_cpu(pixelcnn, tmp_path, dtype, kind):
    modules = [sys.modules[f"pixel_{name}"] for name in ("images", "model", "training")]
    write_cifar(tmp_path)
    images, trainings = modules[0].open_images(str(tmp_path)), []
    for place, dtype_there in (("cpu", "float32"), ("cuda", dtype), ("cuda", dtype)):
        given = options(filters=32, block_size=16, dropout=0.5, device=place, dtype=dtype_there)
        model = modules[1].make_model(given, kind)
        trainings.append(modules[2].Training(kind, model, images, given, None))
    eager = trainings[2]
    eager.update = lambda *arrays: eager._update(*map(ns.to_device, arrays))
    cpu, captured, uncaptured = ([t.train_step().item() for _ in range(4)] for t in trainings)
    assert trainings[1].update.captures == 1
    assert captured == uncaptured
    np.testing.assert_allclose(captured, cpu, rtol=1e-4 if dtype == "float32" else 5e-3)
    states = [t.model.state_dict() for t in trainings[1:]]
    for name, value in states[0].items():
        one, other = (getattr(v, "values", v) for v in (value, states[1][name]))
        np.testing.assert_array_equal(one, other, err_msg=name)
