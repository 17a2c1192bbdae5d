"""examples/pixel_scaling.py: photographs that are for one purpose each, runs, and what is said."""

import io
import json
import tarfile
import zipfile
from dataclasses import replace

import numpy as np
import pytest
from examples_helpers import imported
from pixel_helpers import write_cifar

Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def photographs(monkeypatch):
    return imported(monkeypatch, "pixel_photographs")


@pytest.fixture
def scaling(monkeypatch):
    return imported(monkeypatch, "pixel_scaling")


@pytest.fixture
def plans(monkeypatch):
    return imported(monkeypatch, "pixel_scaling_plan")


@pytest.fixture
def report(monkeypatch):
    return imported(monkeypatch, "pixel_scaling_report")


def png(seed, height=64, width=160, mode="RGB"):
    """A photograph of noise in rectangles, of which no part looks like another, as a file."""
    rng = np.random.default_rng(seed)
    channels = {"RGB": 3, "RGBA": 4, "L": 1}[mode]
    coarse = rng.integers(0, 256, (height // 8, width // 8, channels)).repeat(8, 0).repeat(8, 1)
    pixels = np.clip(coarse + rng.integers(-20, 20, coarse.shape), 0, 255).astype(np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels.squeeze(-1) if channels == 1 else pixels).save(content, "png")
    return content.getvalue()


def write_photographs(folder, count=12):
    folder.mkdir()
    files = {f"{i}.png": png(i) for i in range(count)}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return files


def rows_of(patches):
    return {patch.tobytes() for patch in patches}


def test_a_photograph_is_for_one_purpose(photographs, tmp_path):
    files = write_photographs(tmp_path / "a")
    split, manifest = photographs.gather([str(tmp_path / "a")])
    parts = [one["part"] for one in manifest["photographs"]]
    assert parts == ["test"] * 2 + ["validation"] * 2 + ["train"] * 8
    own = {"train": split.train, "validation": split.held_out, "test": split.test}
    for one in manifest["photographs"]:
        photo = photographs.photograph(files[one["name"]])
        every = rows_of(photographs.cut(photo, 16))
        every |= rows_of(photographs.cut(photo, 16)[:, :, ::-1])
        shared = {part: len(every & rows_of(patches)) for part, patches in own.items()}
        assert [part for part, count in shared.items() if count] == [one["part"]]
        assert shared[one["part"]] == one["kept"] * (1 + (one["part"] == "train"))
    assert len(split.train) == 8 * 2 * 9 * 3  # mirrored, at every 16 pixels
    assert len(split.held_out) == len(split.test) == 2 * 5 * 2
    assert [name.split()[1] for name in split.test_of] == [
        one["name"] for one in manifest["photographs"][:2]
    ]
    assert list(split.test_of.values()) == [slice(0, 10), slice(10, 20)]


@pytest.mark.parametrize("kind", ["folder", "wheel", "archive", "files"])
def test_the_same_photographs_come_from_anywhere(photographs, tmp_path, kind):
    files = write_photographs(tmp_path / "a", 7)
    _, manifest = photographs.gather([str(tmp_path / "a")])
    others = {"grey.png": png(20, mode="L"), "clear.png": png(21, mode="RGBA")}
    others |= {"small.png": png(22, 24, 200), "short.png": png(23, 64, 64), "read.txt": b"no"}
    whole = {f"in/{name}": content for name, content in {**files, **others}.items()}
    whole["other/again.png"] = files["3.png"]
    places = [tmp_path / {"wheel": "b.whl", "archive": "b.tar.gz"}.get(kind, "b")]
    if kind == "wheel":
        with zipfile.ZipFile(places[0], "w") as packed:
            for name, content in whole.items():
                packed.writestr(name, content)
    elif kind == "archive":
        with tarfile.open(places[0], "w:gz") as tar:
            for name, content in whole.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    else:
        for name, content in whole.items():
            (places[0] / name).parent.mkdir(parents=True, exist_ok=True)
            (places[0] / name).write_bytes(content)
    if kind == "files":
        places = sorted((tmp_path / "b").rglob("*.png"))
    assert photographs.gather([*map(str, places)])[1] == manifest


def test_sizes_are_means_of_squares(photographs):
    photo = np.random.default_rng(0).integers(0, 256, (40, 150, 3), dtype=np.uint8)
    expected = photo[:39, :150].reshape(13, 3, 50, 3, 3).astype(np.float64).mean(axis=(1, 3))
    np.testing.assert_array_equal(photographs.smaller(photo, 3), np.floor(expected + 0.5))
    large = np.zeros((352, 1408, 3), np.uint8)
    sizes = [(1408 // f // 32) * (352 // f // 32) for f in (4, 8)]  # 704 is too long, at a half
    assert len(photographs.cut(large, 32)) == sum(sizes)


def test_of_patches_that_look_alike_one_is_kept(photographs):
    rng = np.random.default_rng(1)
    first = rng.integers(0, 16, (4, 4, 4, 3)).repeat(8, 1).repeat(8, 2).astype(np.uint8) * 16 + 8
    close = first + rng.integers(-2, 3, first.shape, dtype=np.int8).astype(np.uint8)
    other = first.copy()
    other[:, :8, :8] ^= 32
    seen = set()
    assert len(photographs.new_of(np.concatenate([first, close[:, :, ::-1]]), seen)) == 4
    np.testing.assert_array_equal(photographs.new_of(np.concatenate([close, other]), seen), other)
    assert len(photographs.new_of(other[:0], seen)) == 0
    assert [len(photographs.spread(np.zeros((n, 1)))) for n in (0, 9, 64, 200, 999)] == [
        *(0, 9, 64, 192, 320)
    ]


def test_of_cifar_a_tenth_is_for_validation(photographs, tmp_path):
    written = write_cifar(tmp_path / "cifar", training=26)
    split, manifest = photographs.gather([str(tmp_path)])
    assert manifest["images"] == {"train": 27, "validation": 3, "test": 5}
    whole = np.concatenate([written["data_batch_1"], written["data_batch_2"]])
    np.testing.assert_array_equal(split.held_out, whole.transpose(0, 2, 3, 1)[27:])
    assert split.test_of == {}


@pytest.mark.parametrize(("what", "says"), [
    ("nowhere", "takes files, folders, wheels and archives, got"),
    ("text.txt", "takes wheels, zip and tar files of images, got"),
    ("few", "takes places with 6 photographs in colour or more, got 5"),
])  # fmt: skip
def test_places_are_refused(scaling, tmp_path, what, says):
    write_photographs(tmp_path / "few", 5)
    (tmp_path / "text.txt").write_text("no image")
    with pytest.raises(SystemExit, match=f"--images {says}"):
        scaling.main(["--images", str(tmp_path / what), "--runs", str(tmp_path / "runs")])


def test_installed_packages_carry_photographs(photographs, monkeypatch):
    monkeypatch.setattr(photographs, "CARRIERS", {"numpy": "linalg", "no_such_package": "data"})
    (folder,) = photographs.installed()
    assert folder.parts[-2:] == ("numpy", "linalg")


@pytest.fixture
def small(scaling, plans, monkeypatch, tmp_path):
    """Arguments, and a tiny group in the place of the plan's."""
    tiny = plans.Size(8, 1, 4)
    groups = (plans.Group(tiny, (plans.DENSE, plans.DEEPER), 8),)
    monkeypatch.setattr(scaling, "GROUPS", groups)
    for end in ("LEAST_RATE", "MOST_RATE"):
        monkeypatch.setattr(plans.Plan, end, 0.01)  # the only one
    runs = imported(monkeypatch, "pixel_scaling_run")
    monkeypatch.setattr(runs, "MARKS", {"search": 1, "final": 2})
    for name, value in (("HELD_OUT_BATCHES", 1), ("STAGES", 1)):
        monkeypatch.setattr(runs, name, value)
    pictures = imported(monkeypatch, "pixel_photographs")
    for name in ("EACH", "MULTIPLE"):
        monkeypatch.setattr(pictures, name, 4)
    write_photographs(tmp_path / "photographs", 6)
    words = "--device cpu --dtype float32 --batch 4 --search-images 4 --seeds 1 --rates 0.01"
    places = {"images": "photographs", "runs": "runs", "results": "all.json"}
    given = [word for key, at in places.items() for word in (f"--{key}", str(tmp_path / at))]
    return [*words.split(), *given]


def test_runs_compare_models_as_large(scaling, small, tmp_path, capsys, monkeypatch):
    drawn = np.arange(2 * 3072, dtype=np.uint8).reshape(2, 32, 32, 3)
    runs = imported(monkeypatch, "pixel_scaling_run")
    monkeypatch.setattr(runs, "sample", lambda _, options: drawn[: options.samples])
    scaling.main([*small, "--minutes", "5", "--samples", "2"])
    results = [json.loads(f.read_text()) for f in (tmp_path / "runs").glob("run-*.json")]
    finals = [run for run in results if run["config"]["purpose"] == "final"]
    assert (len(results), len(finals)) == (4, 2)
    dense, deeper = sorted(finals, key=lambda run: run["blocks"])
    assert (dense["blocks"], deeper["blocks"], dense["density"]) == (1, 2, 1.0)
    assert deeper["parameters"] == pytest.approx(dense["parameters"], rel=0.02)
    for run in finals:
        assert run["steps"] == 2
        assert [mark[0] for mark in run["curve"]] == [4, 8]
        (bits,) = run["by_photograph"].values()
        assert run["test"] == pytest.approx(bits)
        np.testing.assert_array_equal(runs.samples_of(run["samples"]), drawn)
    (tmp_path / "README.md").write_text("a\n<!-- images -->\nold\n<!-- /images -->\nb\n")
    scaling.main([*small, "--collect", str(tmp_path / "all.json")])
    assert (tmp_path / "all.png").stat().st_size > 10000
    assert (tmp_path / "all_samples.png").stat().st_size > 5000
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("a\n<!-- images -->\n| parameters | model |")
    assert text.endswith("\n2 long runs and 2 short ones; 0 diverged\n<!-- /images -->\nb\n")
    for file in (tmp_path / "runs").iterdir():
        file.unlink()
    scaling.main(small)
    assert "all is done" in capsys.readouterr().out


def test_a_run_goes_on_where_the_clock_stopped_it(scaling, plans, small, tmp_path, monkeypatch):
    """Bit for bit: as if it had not been stopped."""
    runs = imported(monkeypatch, "pixel_scaling_run")
    options = scaling.parse(small)
    images, manifest = scaling.gather(options.images)
    plan = scaling.plan_of(options, manifest)
    run = next(plans.runs_plan.missing(plan, {}))
    run = replace(run, purpose="final", amount=8)
    file = tmp_path / "checkpoint.npz"
    assert runs.train(run, plan, images, "cpu", file, until=0.0) is None
    resumed = runs.train(run, plan, images, "cpu", file, until=1e9)
    whole = runs.train(run, plan, images, "cpu", tmp_path / "other.npz", until=1e9)
    assert resumed["test"] == whole["test"] > 0
    assert [mark[2:] for mark in resumed["curve"]] == [mark[2:] for mark in whole["curve"]]


def told(plans, model, bits, seed=0, purpose="final", lr=4e-3, data="one", images=4000):
    plan = plans.Plan(data=data)
    run = plans.runs_plan.Run(purpose, plans.SMALL, model, images, lr, seed)
    return {
        "config": run.config(plan), "samples": "", "filters": 64, "blocks": 2, "density": 0.5,
        "steps": 250,
        "parameters": 1_500_000, "train_seconds": 2.0, "peak_bytes": 2**29, "validation": bits,
        "test": bits if purpose == "final" else None, "diverged": None if bits else "far off",
        "by_photograph": {"0 a.png": bits, "1 b.png": bits},
        "curve": [[2000, 1.0, 5.0, 5.0], [4000, 2.0, 4.0, 4.0]],
    }  # fmt: skip


def test_the_table_has_mean_and_spread_of_one_set_of_images(plans, report):
    runs = [told(plans, plans.DEEPER, bits, seed) for seed, bits in enumerate((3.25, 3.75, None))]
    runs += [told(plans, plans.DENSE, bits, lr=lr) for bits, lr in ((3.5, 2e-3), (3.75, 1e-3))]
    runs += [told(plans, plans.DENSE, 3.0, seed=1, lr=1e-3)]  # no first seed of the best rate
    runs += [told(plans, plans.DENSE, 1.0, data="two")]
    runs += [told(plans, plans.DENSE, bits, purpose="search", lr=lr)
             for lr, bits in ((8e-3, None), (2e-3, 2.5))]  # fmt: skip
    runs[3]["train_seconds"] = 30.0  # those of another rate were faster
    lines = report.table(runs)
    said = "| 1.50 million | {} | 64 | 2 | 50% | {} | 4,000 | {} | {} | 8.0 | 0.50 |"
    assert lines[2:4] == [
        said.format("dense", 0.002, "3.5000", "1 of 1"),
        said.format("deeper 2", 0.004, "3.5000 ± 0.3536", "2 of 3"),
    ]
    assert lines[-5:] == [
        "Short runs: 64x2 dense: 0.002: 2.5000, 0.008: diverged",
        "",
        "Long runs of the first seed: 64x2 dense: 0.001: 3.7500, 0.002: 3.5000",
        "",
        "7 long runs and 2 short ones; 2 diverged",
    ]
    longer = told(plans, plans.DENSE, 2.0, lr=2e-3, images=9000)  # of another length: by itself
    assert report.table([*runs, longer])[-3:-1] == lines[-3:-1]


def test_sizes_are_chosen(scaling):
    plan = scaling.plan_of(scaling.parse(["--sizes", "64x2"]), {"sha256": "0" * 64})
    assert {str(group.size) for group in plan.groups} == {"64x2"}
    assert scaling.plan_of(scaling.parse([]), {"sha256": "0" * 64}).groups == scaling.GROUPS
