"""The images that pixelcnn.py learns from: CIFAR-10 from its binary files, or two photographs."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np

SIZE = 32  # pixels across and down
RECORD = 1 + 3 * SIZE * SIZE  # bytes of an image in CIFAR-10's files: its class, then its colours
STRIP = 64  # pixels: photographs are held out in columns of this width, every fifth of them
STEP = 8  # pixels from one training patch to the next


@dataclass(frozen=True)
class Images:
    """Images as bytes, (n, 32, 32, 3), to learn from and to judge by."""

    name: str
    train: np.ndarray
    held_out: np.ndarray

    @property
    def identity(self) -> str:
        """What tells these images from others, in a checkpoint and in a file of results."""
        sums = [crc32(part.tobytes()) for part in (self.train, self.held_out)]
        sizes = f"{len(self.train)} to learn from, {len(self.held_out)} held out"
        return f"{self.name}: {sizes}, {sums[0]:08x} {sums[1]:08x}"


def open_images(path: str | None) -> Images:
    """CIFAR-10 from its folder, or without one the patches of two photographs.

    ValueError or FileNotFoundError where they are not there, or are something else.
    """
    return photographs() if path is None else cifar(Path(path))


def cifar(folder: Path) -> Images:
    """CIFAR-10's binary version: data_batch_1.bin and further to learn from, test_batch.bin."""
    inner = folder / "cifar-10-batches-bin"
    folder = inner if inner.is_dir() else folder
    if not folder.is_dir():
        raise FileNotFoundError(f"--data takes a folder, got {folder}")
    training, test = sorted(folder.glob("data_batch_*.bin")), folder / "test_batch.bin"
    if not training or not test.is_file():
        raise FileNotFoundError(
            f"--data takes CIFAR-10's binary version, a folder with data_batch_1.bin and "
            f"test_batch.bin; {folder} lacks {'test_batch.bin' if training else 'data_batch_1.bin'}"
        )
    return Images(
        "CIFAR-10", np.concatenate([read_batch(file) for file in training]), read_batch(test)
    )


def read_batch(file: Path) -> np.ndarray:
    """The images of one file. Each is its class, then all its red, green and blue, row by row."""
    content = np.fromfile(file, np.uint8)
    if content.size == 0 or content.size % RECORD:
        raise ValueError(
            f"{file} takes images of {RECORD} bytes each, got {content.size} bytes: it is cut "
            f"short, or no file of CIFAR-10's binary version"
        )
    planes = content.reshape(-1, RECORD)[:, 1:].reshape(-1, 3, SIZE, SIZE)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1))


def photographs() -> Images:
    """Patches of scikit-learn's two sample photographs, which are 640 x 427 pixels each.

    Every fifth column of 64 pixels is held out: no pixel of it is in a training patch.
    """
    try:
        from sklearn.datasets import load_sample_images
    except ImportError as error:
        raise ValueError(
            f"without --data, the photographs of scikit-learn are taken, which is not there "
            f"({error}): pip install scikit-learn"
        ) from error
    photos = [np.asarray(photo, np.uint8) for photo in load_sample_images().images]
    train = [p for photo in photos for part in parts(photo, False) for p in patches(part, STEP)]
    held_out = [p for photo in photos for part in parts(photo, True) for p in patches(part, SIZE)]
    return Images("two photographs", np.array(train), np.array(held_out))


def parts(photo: np.ndarray, held_out: bool) -> Iterator[np.ndarray]:
    """The columns of a photograph that are held out, or those between them."""
    begin = 0
    for edge in [*range(2 * STRIP, photo.shape[1], 5 * STRIP), photo.shape[1]]:
        if not held_out:
            yield photo[:, begin:edge]
        elif edge < photo.shape[1]:
            yield photo[:, edge : edge + STRIP]
        begin = edge + STRIP


def patches(photo: np.ndarray, step: int) -> Iterator[np.ndarray]:
    """All the 32 x 32 pixels of a photograph that begin at whole steps."""
    height, width = (n - SIZE + 1 for n in photo.shape[:2])
    for i in range(0, height, step):
        for j in range(0, width, step):
            yield photo[i : i + SIZE, j : j + SIZE]


class Batches:
    """The training images in an order drawn anew for each round, as batches of equal size."""

    def __init__(self, images: np.ndarray, batch: int, seed: int):
        if batch > len(images):
            raise ValueError(
                f"--batch takes at most the {len(images)} training images, got {batch}"
            )
        self.images, self.batch, self.seed = images, batch, seed
        self.round = len(images) // batch  # batches; what is left over waits for the next round
        self._number = -1
        self._order: np.ndarray = np.zeros(0, int)

    def at(self, step: int) -> np.ndarray:
        """The batch of a step: the same for every model, and after every resumption."""
        number, place = divmod(step, self.round)
        if self._number != number:
            rng = np.random.default_rng([self.seed, number])
            self._number, self._order = number, rng.permutation(len(self.images))
        return self.images[self._order[place * self.batch : (place + 1) * self.batch]]
