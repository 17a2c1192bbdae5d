"""Images drawn from a PixelCNN, a pixel after the other."""

from argparse import Namespace
from typing import Any

import numpy as np
from pixel_images import SIZE
from pixel_loss import draw_pixels
from pixel_model import PixelCNN
from pixel_training import network_input

import numbsparse as ns


def sample(model: PixelCNN, options: Namespace) -> np.ndarray:
    """`options.samples` images of bytes, (n, 32, 32, 3).

    The vertical stream is computed once a row, the other once a pixel, and rows that nothing has
    been drawn in yet are left out: no pixel that comes before depends on them.
    """
    on_gpu, whole = options.device == "cuda", 2 ** (options.stages - 1)
    above: Any = ns.graph(model.above) if on_gpu else model.above
    along: Any = ns.graph(model.along) if on_gpu else model.along
    rng = np.random.default_rng(options.seed)
    images = np.zeros((options.samples, SIZE, SIZE, 3), np.uint8)
    model.eval()
    with ns.no_grad():
        for i in range(SIZE):
            rows = SIZE if on_gpu else (i // whole + 1) * whole
            features = above(placed(images[:, :rows], options))
            for j in range(SIZE):
                outputs = along(placed(images[:, :rows], options), features).numpy()
                outputs = outputs.reshape(options.samples, rows, SIZE, -1)[:, i, j]
                images[:, i, j] = draw_pixels(outputs, rng)
    model.train()
    return images


def placed(images: np.ndarray, options: Namespace) -> ns.Tensor:
    x = network_input(images)
    return ns.Tensor(ns.to_device(x) if options.device == "cuda" else x)
