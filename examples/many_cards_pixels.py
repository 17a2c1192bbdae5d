"""PixelCNN++ on several cards: a whole update, captured, of random images."""

import gc
from argparse import Namespace
from typing import Any

import numpy as np
import pixelcnn as program
from many_cards_times import seconds_of
from pixel_images import SIZE, Images
from pixel_loss import targets_of
from pixel_model import make_model
from pixel_training import Training, network_input

from numbsparse.distributed import Group


def pixelcnn(group: Group, options: Namespace) -> list[dict[str, Any]]:
    """Seconds of an update on one card, and on all of them with as many images each."""
    on_gpu = options.device == "cuda"
    words = ["--filters", str(options.filters), "--blocks", str(options.blocks), "--dropout", "0.5"]
    words += ["--mixtures", "10", "--block-size", "32" if options.filters % 32 == 0 else "8"]
    words += ["--device", options.device, "--dtype", "bfloat16" if on_gpu else "float32"]
    rng = np.random.default_rng(group.rank)
    pictures = rng.integers(0, 256, (options.images, SIZE, SIZE, 3), np.uint8)
    images = Images("random", np.repeat(pictures, group.size, axis=0), pictures[:1])
    seconds: dict[str, Any] = {}
    for name, ranks in (("one", group.split(group.rank)), ("all", group)):
        batch = ["--batch", str(options.images * ranks.size)]
        given = program.parse([*words, *batch])
        model = make_model(given, "sparse")
        training = Training(name, model, images, given, None, ranks)
        x, targets = map(training.placed, (network_input(pictures), targets_of(pictures)))
        seconds[name] = seconds_of(group, lambda: training.update(x, targets), options.repeats)  # noqa: B023
        gc.collect()  # a captured step and its model know each other
    row = {
        "ranks": group.size,
        "images": options.images,
        **program.size(model),
        "dtype": given.dtype,
    }
    row["gradients"] = sum(p.values.nbytes for p in model.parameters())
    return [row | seconds]
