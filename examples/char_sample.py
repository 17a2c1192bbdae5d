"""Text written by a model of char_model.py, a character after the other."""

from argparse import Namespace
from typing import Any

import numpy as np
from char_model import CharModel, State
from char_text import Text

import numbsparse as ns
from numbsparse.nn import functional as F


def sample(model: CharModel, text: Text, options: Namespace) -> str:
    """`options.sample` characters that follow `options.prompt`, drawn at a temperature."""
    on_gpu = options.device == "cuda"

    def step(codes: Any, state: State) -> tuple[ns.Tensor, State]:
        logits, state = model(codes, state)
        return F.softmax(logits[-1] * (1 / options.temperature)), state

    follow = ns.graph(step) if on_gpu else step
    rng = np.random.default_rng(options.seed)
    codes = text.encode(options.prompt) or [max(text.alphabet.find(b"\n"), 0)]
    state = model.zero_state(1)
    with ns.no_grad():
        for code in codes:
            p, state = follow(np.array([[code]], np.int32), state)
        for _ in range(options.sample):
            chances = p.numpy()[0].astype(float)
            codes.append(int(rng.choice(chances.size, p=chances / chances.sum())))
            p, state = follow(np.array([[codes[-1]]], np.int32), state)
    return text.decode(codes)
