"""Photographs that packages carry, or a user has, in patches: each for one purpose as a whole.

A photograph is halved as often as gives longer sides of 128 to 700 pixels, and each size is cut
into patches of 32 x 32: side by side where it is held out, every 16 pixels where it is learned
from. Of patches that look alike at a glance one is kept.

The photographs are read where they lie and passed on to nobody: a manifest says what was taken,
and its hash whether two machines had the same.
"""

import hashlib
import io
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from pixel_images import SIZE, Images, cifar, patches

ENDINGS = (".jpg", ".jpeg", ".png")
CARRIERS = {  # where installed packages keep some
    "sklearn": "datasets/images",
    "skimage": "data",
    "matplotlib": "mpl-data/sample_data",
}
FACTORS = (1, 2, 4, 8, 16)
LONGER_SIDE = (128, 700)  # pixels, of a size that is cut into patches
SHARES = 6  # of the photographs one such share is for validation, and one for the test
EACH = 320  # patches of a photograph that is held out, at most, in whole multiples of
MULTIPLE = 64
COARSE = 8  # pixels that a glance takes together
LEVELS = 16  # of a colour that it tells from others

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Split(Images):
    """Images to learn from, to validate (`held_out`), and to test by: rows of each photograph."""

    test: np.ndarray
    test_of: dict[str, slice]


def gather(places: list[str]) -> tuple[Split, Manifest]:
    """The patches of all photographs there; of installed packages for none; or CIFAR-10's images.

    ValueError where there are too few, or a place holds something else.
    """
    batches = [file for place in places for file in Path(place).rglob("data_batch_1.bin")]
    if batches:
        return of_cifar(batches[0].parent)
    return of_photographs([Path(place) for place in places] or installed())


def installed() -> list[Path]:
    """The folders of installed packages that carry photographs."""
    specs = {inner: find_spec(package) for package, inner in CARRIERS.items()}
    return [
        Path(place, inner)
        for inner, spec in specs.items()
        for place in (spec and spec.submodule_search_locations) or ()
    ]


def of_cifar(folder: Path) -> tuple[Split, Manifest]:
    """CIFAR-10; the last tenth of its training images is for validation."""
    whole = cifar(folder)
    train, validation = np.split(whole.train, [-(len(whole.train) // 10)])
    split = Split("CIFAR-10", train, validation, whole.held_out, {})
    return split, manifest_of(split, [])


def of_photographs(places: list[Path]) -> tuple[Split, Manifest]:
    """In the order of their hashes, which also say what each is for."""
    found: dict[bytes, tuple[str, bytes]] = {}
    for place in places:
        for name, content in files_of(place):
            found.setdefault(hashlib.sha256(content).digest(), (name, content))
    opened = [(name, photograph(content)) for _, (name, content) in sorted(found.items())]
    photographs = [(name, photo) for name, photo in opened if photo is not None]
    share = len(photographs) // SHARES
    if not share:
        raise ValueError(
            f"--images takes places with {SHARES} photographs in colour or more, "
            f"got {len(photographs)}"
        )
    parts: dict[str, dict[str, np.ndarray]] = {"test": {}, "validation": {}, "train": {}}
    seen: set[bytes] = set()
    told = []
    for i, (name, photo) in enumerate(photographs):
        part = ("test", "validation", "train")[min(i // share, 2)]
        whole = cut(photo, SIZE // 2 if part == "train" else SIZE)
        kept = new_of(whole, seen)
        kept = kept if part == "train" else spread(kept)
        parts[part][f"{i} {name}"] = kept
        told.append({"name": name, "part": part, "pixels": list(photo.shape[1::-1]),
                     "patches": len(whole), "kept": len(kept)})  # fmt: skip
    arrays = [np.concatenate(list(part.values())) for part in parts.values()]
    test, validation, train = arrays
    train = np.concatenate([train, train[:, :, ::-1]])  # and mirrored
    ends = np.cumsum([0, *map(len, parts["test"].values())]).tolist()
    rows = dict(zip(parts["test"], map(slice, ends, ends[1:]), strict=False))
    split = Split("photographs", train, validation, test, rows)
    return split, manifest_of(split, told)


def manifest_of(split: Split, photographs: list[Manifest]) -> Manifest:
    """What was taken, and the hash of all of it."""
    whole, parts = hashlib.sha256(), (split.train, split.held_out, split.test)
    for part in parts:
        whole.update(np.ascontiguousarray(part).data)
    names = ("train", "validation", "test")
    return {
        "name": split.name,
        "images": dict(zip(names, map(len, parts), strict=True)),
        "photographs": photographs,
        "sha256": whole.hexdigest(),
    }


def files_of(place: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of each image file of a folder or an archive, or of the one that it is."""
    if place.is_dir():
        for path in sorted(place.rglob("*")):
            if path.suffix.lower() in ENDINGS and path.is_file():
                yield path.name, path.read_bytes()
    elif not place.is_file():
        raise ValueError(f"--images takes files, folders, wheels and archives, got {place}")
    elif place.suffix.lower() in ENDINGS:
        yield place.name, place.read_bytes()
    elif zipfile.is_zipfile(place):
        with zipfile.ZipFile(place) as archive:
            for name in sorted(archive.namelist()):
                if name.lower().endswith(ENDINGS):
                    yield Path(name).name, archive.read(name)
    elif tarfile.is_tarfile(place):
        with tarfile.open(place) as packed:
            for member in sorted(packed.getmembers(), key=lambda member: member.name):
                content = packed.extractfile(member)
                if content and member.name.lower().endswith(ENDINGS):
                    yield Path(member.name).name, content.read()
    else:
        raise ValueError(f"--images takes wheels, zip and tar files of images, got {place}")


def photograph(content: bytes) -> np.ndarray | None:
    """Its pixels (height, width, 3); None of an image that is small, grey or partly transparent."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ValueError(
            f"--images takes Pillow, which is not there ({error}): pip install pillow"
        ) from error
    with Image.open(io.BytesIO(content)) as image:
        is_one = image.mode == "RGB" and max(image.size) >= LONGER_SIDE[0]
        return np.asarray(image) if is_one and min(image.size) >= SIZE else None


def cut(photo: np.ndarray, step: int) -> np.ndarray:
    """The patches of all sizes that begin at whole steps, (n, 32, 32, 3)."""
    least, most = LONGER_SIDE
    sizes = [
        smaller(photo, factor) for factor in FACTORS if least <= max(photo.shape) // factor <= most
    ]
    whole = [patch for size in sizes for patch in patches(size, step)]
    return np.array(whole, np.uint8).reshape(-1, SIZE, SIZE, 3)


def smaller(photo: np.ndarray, factor: int) -> np.ndarray:
    """The mean of each square of `factor` pixels, rounded."""
    height, width = (n // factor for n in photo.shape[:2])
    whole = photo[: height * factor, : width * factor].reshape(height, factor, -1)
    sums = whole.sum(axis=1, dtype=np.uint32).reshape(height, width, factor, 3).sum(axis=2)
    return ((sums + factor**2 // 2) // factor**2).astype(np.uint8)


def new_of(whole: np.ndarray, seen: set[bytes]) -> np.ndarray:
    """The patches that no earlier one looks like, mirrored or not: by mean colours, coarsely."""
    n = SIZE // COARSE
    means = whole.reshape(-1, n, COARSE, n, COARSE, 3).mean(axis=(2, 4))
    glances = (means * LEVELS / 256).astype(np.uint8)
    kept = []
    for i, glance in enumerate(glances):
        key = min(glance.tobytes(), glance[:, ::-1].tobytes())
        if key not in seen:
            seen.add(key)
            kept.append(i)
    return whole[kept]


def spread(whole: np.ndarray) -> np.ndarray:
    """Up to `EACH` of them from everywhere, in whole multiples, so that batches are full."""
    count = min(len(whole), EACH)
    count = count // MULTIPLE * MULTIPLE or count
    return whole[np.arange(count) * len(whole) // max(count, 1)]
