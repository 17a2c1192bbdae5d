"""The model of char_lm.py, and one training of it that a checkpoint can stop and resume."""

from __future__ import annotations

from argparse import Namespace
from math import log
from typing import Any

import numpy as np
from char_text import Text, streams
from progress import progress_bar

import numbsparse as ns
from numbsparse import nn
from numbsparse.nn import functional as F
from numbsparse.nn import optim

State = tuple[ns.Tensor, ns.Tensor]

BITS = 1 / log(2)  # a nat in bits


class CharModel(nn.Module):
    """Characters to logits of the next character: embedding, LSTM, linear."""

    def __init__(
        self,
        symbols: int,
        hidden: int,
        *,
        layout: Any,
        embedding: int = 64,
        block_size: int = 32,
        seed: int = 0,
    ):
        super().__init__()
        rng = np.random.default_rng(seed)
        self.embedding = nn.Embedding(symbols, embedding, seed=rng)
        self.lstm = nn.LSTM(embedding, hidden, layout=layout, block_size=block_size, seed=rng)
        self.output = nn.Linear(hidden, symbols, block_size=block_size, seed=rng)

    def forward(self, codes: Any, state: State | None = None) -> tuple[ns.Tensor, State]:
        """codes (time, batch) -> logits (time, batch, symbols), state."""
        hidden, state = self.lstm(self.embedding(codes), state)
        return self.output(hidden), state


class Training:
    """One model on its way through a text. `options` are the program's arguments."""

    def __init__(self, name: str, model: CharModel, text: Text, options: Namespace):
        self.name, self.model, self.options = name, model, options
        model.to(options.device)
        self.train_text = streams(text.train, options.batch)
        self.held_out_text = streams(text.held_out, options.batch)
        self.optimizer = optim.Adam(model.parameters(), lr=options.lr)
        self.update = ns.graph(self._update) if options.device == "cuda" else self._update
        self.file = options.out / f"{name}.npz"
        self.settings = {
            key: getattr(options, key)
            for key in [
                "hidden",
                "pattern",
                "density",
                "block_size",
                "batch",
                "length",
                "steps",
                "lr",
                "seed",
            ]
        } | {"text": text.name}
        self.step = 0
        self.state: State | None = None
        self.curve: list[tuple[float, float, float]] = []  # step, training bits, held-out bits

    def run(self) -> float:
        """Train to the last step; gives the bits per character on the held-out text."""
        options = self.options
        mark = max(options.steps // 10, 1)
        with progress_bar(self.name, options.steps, self.step) as bar:
            while self.step < options.steps:
                loss = self.train_step()
                at_mark = self.step % mark == 0 or self.step == options.steps
                if at_mark or self.step % 10 == 0:
                    self._note(loss.item() * BITS, self.held_out_bits() if at_mark else np.nan)
                    bar.show(self.step, self.curve[-1], options.batch * options.length)
                if at_mark:
                    self.save()
        return self.curve[-1][2]

    def train_step(self) -> ns.Tensor:
        """One update. The loss stays a Tensor, so that nothing waits for a GPU."""
        options = self.options
        factor = optim.warmup_cosine(self.step, options.steps, options.steps // 20, floor=0.05)
        self.optimizer.lr = options.lr * factor
        codes, targets, anew = self._batch(self.train_text, self.step)
        if anew or self.state is None:
            self.state = self.model.lstm.zero_state(options.batch)
        loss, self.state = self.update(codes, targets, self.state)
        self.step += 1
        return loss

    def _update(self, codes: Any, targets: Any, state: State) -> tuple[ns.Tensor, State]:
        """Forward, backward and optimizer: on a GPU captured once, and then replayed."""
        logits, (h, c) = self.model(codes, state)
        loss = F.cross_entropy(logits, targets)
        self.model.zero_grad()
        loss.backward()
        optim.clip_by_global_norm(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach(), (h.detach(), c.detach())

    def held_out_bits(self) -> float:
        """Bits per character on the held-out text, the state carried along."""
        batches = (len(self.held_out_text) - 1) // self.options.length
        losses, state = [], None
        with ns.no_grad():
            for step in range(min(batches, self.options.held_out_batches)):
                codes, targets, _ = self._batch(self.held_out_text, step)
                logits, state = self.model(codes, state)
                losses.append(F.cross_entropy(logits, targets).item())
        return float(np.mean(losses)) * BITS

    def sample(self, text: Text, n_characters: int, prompt: str = "def ") -> str:
        """Text written by the model, a character after the other."""
        rng = np.random.default_rng(self.options.seed)
        codes = [text.alphabet.index(byte) for byte in prompt.encode() if byte in text.alphabet]
        codes, state, new = codes or [0], None, codes or [0]
        with ns.no_grad():
            for _ in range(n_characters):
                inputs = np.array(new, np.int32)[:, None]
                logits, state = self.model(self._placed(inputs), state)
                p = F.softmax(logits[-1]).numpy()[0].astype(float)
                new = [int(rng.choice(len(p), p=p / p.sum()))]
                codes = codes + new
        return text.decode(codes)

    def save(self) -> None:
        """Write everything that the next step depends on."""
        h, c = (part.numpy() for part in self.state or ())
        checkpoint = {
            "settings": self.settings,
            "step": self.step,
            "curve": np.array(self.curve),
            "state": {"h": h, "c": c},
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        ns.save(self.file, checkpoint)

    def resume(self) -> None:
        """Go on where `save` was; refused where the settings are others."""
        checkpoint = ns.load(self.file)
        theirs = checkpoint.get("settings")
        if theirs != self.settings:
            raise ValueError(f"{self.file} was made with {theirs}; this run has {self.settings}")
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        h, c = (ns.Tensor(self._placed(checkpoint["state"][part])) for part in "hc")
        self.state = (h, c)
        self.step = checkpoint["step"]
        self.curve = [tuple(row) for row in checkpoint["curve"].tolist()]

    def _note(self, training_bits: float, held_out_bits: float) -> None:
        if not np.isfinite(training_bits):
            raise FloatingPointError(
                f"the loss is no number after step {self.step}: try a lower --lr "
                f"(the last good state is in {self.file}, if one was reached)"
            )
        self.curve.append((self.step, training_bits, held_out_bits))

    def _batch(self, text: np.ndarray, step: int) -> tuple[Any, Any, bool]:
        """Characters, their successors, both (length, batch), and whether the text begins anew."""
        length = self.options.length
        start = step % ((len(text) - 1) // length) * length
        codes = text[start : start + length + 1].astype(np.int32)
        return self._placed(codes[:-1]), self._placed(codes[1:]), start == 0

    def _placed(self, array: np.ndarray) -> Any:
        return ns.to_device(array) if self.options.device == "cuda" else array
