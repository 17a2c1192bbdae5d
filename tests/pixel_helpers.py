"""What the tests of examples/pixelcnn.py share: small settings, and files of a few images."""

from argparse import Namespace

import numpy as np

SMALL = ["--filters", "8", "--blocks", "1", "--block-size", "4", "--mixtures", "2", "--batch", "4"]
SMALL += ["--device", "cpu", "--samples", "0", "--mark-every", "2", "--stages", "1"]


def options(**others):
    """The program's options where there is no program."""
    small = {"filters": 8, "blocks": 1, "stages": 3, "mixtures": 2, "block_size": 4, "dropout": 0.0}
    small |= {"deeper": 2.0, "wider": 1.0, "dtype": "float64", "precision": "highest", "seed": 0}
    small |= {"device": "cpu", "batch": 4, "steps": 8, "lr": 1e-3, "clip": 1.0, "average": 0.9995}
    small |= {"mark_every": None, "held_out_batches": 2, "samples": 2}
    return Namespace(**small | others)


def write_cifar(folder, training=12, test=5, seed=0):
    """Images with something to learn: each is a plain colour, and a little noise."""
    rng = np.random.default_rng(seed)
    folder.mkdir(exist_ok=True)
    images = {}
    for name, count in (("data_batch_1", training), ("data_batch_2", 4), ("test_batch", test)):
        colours = rng.integers(40, 200, (count, 3, 1, 1)) + rng.integers(-9, 10, (count, 3, 32, 32))
        images[name] = colours.astype(np.uint8)
        classes = rng.integers(0, 10, (count, 1), dtype=np.uint8)
        records = np.concatenate([classes, images[name].reshape(count, -1)], axis=1)
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    return images
