"""One training of a PixelCNN, which a kill at any moment can stop and resume."""

from argparse import Namespace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import pixel_checkpoint
from char_training import BITS, make_scaler
from pixel_images import Batches, Images
from pixel_loss import log_probability, scaled, targets_of
from pixel_model import PixelCNN, begin
from progress import progress_bar
from ranks import mean, part_of

import numbsparse as ns
import numbsparse.distributed as dist
from numbsparse import nn
from numbsparse.nn import optim


class Training:
    """A model on its way through the images. `options` are the program's arguments.

    Each rank has its rows of the batch: losses and checkpoints are those of all of them.

    At each mark, `options.mark_every` steps, held-out images are judged by the averaged weights,
    and a checkpoint is written to `file` if there is one; never of a diverged state.
    """

    def __init__(
        self,
        name: str,
        model: PixelCNN,
        images: Images,
        options: Namespace,
        file: Path | None,
        group: dist.Group | None = None,
    ):
        self.name, self.model, self.images = name, model, images
        self.options, self.file = options, file
        self.group = group or dist.init()
        self.rows = part_of(options.batch, self.group)
        dist.DataParallel(model.to(options.device), self.group)
        self.batches = Batches(images.train, options.batch, options.seed)
        self.optimizer = optim.Adam(model.parameters(), lr=options.lr, betas=(0.95, 0.9995))
        self.average = optim.ExponentialMovingAverage(model.parameters(), options.average)
        self.scaler = make_scaler(options.dtype)
        on_gpu = options.device == "cuda"
        self.update = ns.graph(self._update) if on_gpu else self._update
        self.evaluate = ns.graph(self._evaluate) if on_gpu else self._evaluate
        self.step = 0
        self.curve: list[tuple[float, float, float]] = []  # step, training bits, held-out bits

    def run(self) -> None:
        """Train to the last step.

        Raises FloatingPointError where the loss is not finite; what was saved stays as it is.
        """
        options = self.options
        every = options.mark_every or max(options.steps // 10, 1)
        with progress_bar(self.name, options.steps, self.step, unit="dim", read="images") as bar:
            while self.step < options.steps:
                loss = self.train_step()
                mark = self.step % every == 0 or self.step == options.steps
                if mark or self.step % 10 == 0:
                    loss_bits = mean(loss.item(), self.group) * BITS
                    self._note(loss_bits, self.bits() if mark else None)
                    bar.show(self.step, self.curve[-1], options.batch)
                if mark and self.file:
                    pixel_checkpoint.save(self, self.file)

    def train_step(self) -> ns.Tensor:
        """One update. The loss stays a Tensor, so that nothing waits for a GPU."""
        options = self.options
        batch = self.batches.at(self.step)
        if self.step == 0:
            begin(self.model, self.placed(network_input(batch)))
        factor = optim.warmup_cosine(self.step, options.steps, options.steps // 10, floor=0.05)
        self.optimizer.lr = options.lr * factor
        batch = batch[self.rows]
        loss = self.update(network_input(batch), targets_of(batch))
        self.step += 1
        return loss

    def bits(self, whole: bool = False) -> float:
        """Bits per dimension of held-out images, of some from everywhere or of all."""
        held_out = self.images.held_out
        count = len(held_out)
        if not whole:
            count = min(count, self.options.batch * self.options.held_out_batches)
        return self.bits_of(held_out[np.arange(count) * len(held_out) // count])

    def bits_of(self, images: np.ndarray) -> float:
        """Bits per dimension of images, by averaged weights."""
        own, size, total = images[self.group.rank :: self.group.size], self.options.batch, 0.0
        drops_out = self.options.dropout > 0
        if drops_out:  # a change of mode has the steps captured anew, which takes seconds
            self.model.eval()
        with ns.no_grad(), self.average.applied():
            for start in range(0, len(own), size):
                batch = own[start : start + size]
                loss = self.evaluate(network_input(batch), targets_of(batch))
                total += loss.item() * len(batch)
        if drops_out:
            self.model.train()
        return mean(total, self.group) * self.group.size / len(images) * BITS

    def placed(self, array: np.ndarray) -> ns.Tensor:
        """A Tensor beside the model."""
        return ns.Tensor(ns.to_device(array) if self.options.device == "cuda" else array)

    def _update(self, x: Any, targets: Any) -> ns.Tensor:
        """Forward, backward and optimizer: on a GPU captured once, and then replayed."""
        loss = self._evaluate(x, targets)
        self.model.zero_grad()
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        nn.utils.clip_grad_norm(self.model.parameters(), self.options.clip, scaler=self.scaler)
        if self.scaler:
            self.scaler.step(self.optimizer)
        else:
            self.optimizer.step()
        self.average.step()
        return loss.detach()

    def _evaluate(self, x: Any, targets: Any) -> ns.Tensor:
        """Nats per colour of a pixel: the mean, so that a float16 gradient is no smaller by it."""
        x, targets = (a if isinstance(a, ns.Tensor) else ns.Tensor(a) for a in (x, targets))
        return log_probability(self.model(x), targets).mean() * (-1 / 3)

    def _note(self, training_bits: float, held_out_bits: float | None) -> None:
        """Add a point to the curve. The held-out loss shows what the last update did."""
        held_out = np.nan if held_out_bits is None else held_out_bits
        if not isfinite(training_bits) or not (held_out_bits is None or isfinite(held_out_bits)):
            kept = f"; {self.file} is as it was" if self.file and self.file.exists() else ""
            raise FloatingPointError(
                f"the {self.name} model's loss is not finite at step {self.step}: "
                f"take a lower --lr than {self.options.lr}{kept}"
            )
        self.curve.append((self.step, training_bits, held_out))


def network_input(images: np.ndarray) -> np.ndarray:
    """Images (n, height, width, 3) of bytes as (n, height, width, 4) from -1 to 1, the last 1."""
    return np.concatenate([scaled(images), np.ones((*images.shape[:3], 1), np.float32)], axis=-1)
