"""One training of a model of char_model.py, which a kill at any moment can stop and resume."""

from argparse import Namespace
from math import isfinite, log, log2
from pathlib import Path
from typing import Any

import char_checkpoint
import numpy as np
from char_model import CharModel, State, dense_twin, sparse_model
from char_options import make_folder
from char_text import Streams, Text
from progress import progress_bar
from ranks import mean, part_of

import numbsparse as ns
import numbsparse.distributed as dist
from numbsparse import nn
from numbsparse.nn import functional as F
from numbsparse.nn import optim

BITS = 1 / log(2)  # a nat in bits
DIVERGED = 4.0  # a loss as many times that of guessing comes from weights that run away


class Training:
    """A model on its way through a text. `options` are the program's arguments.

    Each rank reads its rows of the batch: losses and checkpoints are those of all of them.

    At each mark, `options.mark_every` steps, the held-out text is read, and a checkpoint written to
    `file` if there is one; never of a diverged state.
    """

    def __init__(
        self,
        name: str,
        model: CharModel,
        text: Text,
        options: Namespace,
        file: Path | None = None,
        group: dist.Group | None = None,
    ):
        self.name, self.model, self.text, self.options, self.file = name, model, text, options, file
        self.group = group or dist.init()
        self.rows = part_of(options.batch, self.group)
        dist.DataParallel(model.to(options.device), self.group)
        self.train_text = self._streams(text.train)
        self.held_out_text = self._streams(text.held_out)
        self.optimizer = optim.Adam(model.parameters(), lr=options.lr)
        self.scaler = make_scaler(options.dtype)
        on_gpu = options.device == "cuda"
        self.update = ns.graph(self._update) if on_gpu else self._update
        self.evaluate = ns.graph(self._evaluate) if on_gpu else self._evaluate
        self.step = 0
        self.state: State | None = None
        self.curve: list[tuple[float, float, float]] = []  # step, training bits, held-out bits

    def run(self) -> float:
        """Train to the last step; gives the bits per character on the held-out text.

        Raises FloatingPointError where the loss is not finite, or far above that of guessing; what
        was saved stays as it is.
        """
        options = self.options
        every = options.mark_every or max(options.steps // 10, 1)
        with progress_bar(self.name, options.steps, self.step) as bar:
            while self.step < options.steps:
                loss = self.train_step()
                mark = self.step % every == 0 or self.step == options.steps
                if mark or self.step % 10 == 0:
                    self._note(
                        mean(loss.item(), self.group) * BITS,
                        self.bits(self.held_out_text) if mark else None,
                    )
                    bar.show(self.step, self.curve[-1], options.batch * options.length)
                if mark and self.file:
                    char_checkpoint.save(self, self.file)
        return self.curve[-1][2]

    def train_step(self) -> ns.Tensor:
        """One update. The loss stays a Tensor, so that nothing waits for a GPU."""
        options = self.options
        factor = optim.warmup_cosine(self.step, options.steps, options.steps // 20, floor=0.05)
        self.optimizer.lr = options.lr * factor
        codes, targets, anew = self.train_text.at(self.step)
        if anew or self.state is None:
            self.state = self.model.zero_state(self.rows.stop - self.rows.start)
        loss, self.state = self.update(codes, targets, self.state)
        self.step += 1
        return loss

    def bits(self, text: Streams, whole: bool = False) -> float:
        """Bits per character on other text, its beginning or all of it, the state carried along."""
        n_steps = text.n_steps if whole else min(text.n_steps, self.options.held_out_batches)
        losses, state = [], self.model.zero_state(self.rows.stop - self.rows.start)
        with ns.no_grad():
            for step in range(n_steps):
                codes, targets, _ = text.at(step)
                loss, state = self.evaluate(codes, targets, state)
                losses.append(loss)
        return mean(float(np.mean([loss.item() for loss in losses])), self.group) * BITS

    def test_bits(self) -> float | None:
        """Bits per character on all of the test text, where the text has one."""
        test = self.text.test
        return None if test is None else self.bits(self._streams(test), whole=True)

    def placed(self, array: np.ndarray) -> ns.Tensor:
        """A Tensor beside the model."""
        return ns.Tensor(ns.to_device(array) if self.options.device == "cuda" else array)

    def _update(self, codes: Any, targets: Any, state: State) -> tuple[ns.Tensor, State]:
        """Forward, backward and optimizer: on a GPU captured once, and then replayed."""
        logits, (h, c) = self.model(codes, state)
        loss = F.cross_entropy(logits, targets)
        self.model.zero_grad()
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        nn.utils.clip_grad_norm(self.model.parameters(), self.options.clip, scaler=self.scaler)
        if self.scaler:
            self.scaler.step(self.optimizer)
        else:
            self.optimizer.step()
        return loss.detach(), (h.detach(), c.detach())

    def _evaluate(self, codes: Any, targets: Any, state: State) -> tuple[ns.Tensor, State]:
        logits, state = self.model(codes, state)
        return F.cross_entropy(logits, targets), state

    def _streams(self, part: np.ndarray) -> Streams:
        options = self.options
        return Streams(part, self.text.code_of, options.batch, options.length, self.rows)

    def _note(self, training_bits: float, held_out_bits: float | None) -> None:
        """Add a point to the curve. The held-out loss shows what the last update did."""
        held_out = np.nan if held_out_bits is None else held_out_bits
        worst = float(np.max([training_bits, held_out_bits or 0.0]))  # NaN where one of them is
        guessing = max(log2(len(self.text.alphabet)), 1.0)
        if not worst <= DIVERGED * guessing:
            what = f"{worst:.3g} bits, where guessing takes {guessing:.3g},"
            kept = f"; {self.file} is as it was" if self.file and self.file.exists() else ""
            raise FloatingPointError(
                f"the {self.name} model's loss is {what if isfinite(worst) else 'not finite'} "
                f"at step {self.step}: take a lower --lr than {self.options.lr}{kept}"
            )
        self.curve.append((self.step, training_bits, held_out))


def make_scaler(dtype: str) -> optim.LossScaler | None:
    """For float16, whose small gradients would vanish, and for bfloat16 to skip bad steps."""
    if dtype == "float32":
        return None
    return optim.LossScaler() if dtype == "float16" else optim.LossScaler(1.0, interval=None)


def prepare(options: Namespace, text: Text) -> tuple[list[Training], list[np.ndarray]]:
    """The trainings, resumed where that was asked for, and the sparse model's patterns."""
    symbols = len(text.alphabet)
    sparse, wiring = sparse_model(symbols, options)
    models = {"sparse": sparse}
    if options.compare:
        models["dense"] = dense_twin(sparse, symbols, options)
    make_folder(options.out)
    trainings = []
    for name, model in models.items():
        file = options.out / f"{name}.npz"
        trainings.append(Training(name, model, text, options, file))
        if options.resume and file.exists():
            char_checkpoint.resume(trainings[-1], file)
        elif options.resume:
            print(f"there is no {file}: the {name} model begins anew")
        elif file.exists() and dist.init().rank == 0:
            earlier = file.replace(file.with_suffix(".earlier.npz"))
            print(f"an earlier run's checkpoint is kept as {earlier}")
    return trainings, wiring
