"""Lesson 8: from a dense NumPy network to a block-sparse one.

You will learn to make a network that you have sparse. From 16 letters of Python's standard library
it guesses the next. A network with one hidden layer is trained by hand, in NumPy, then by `ns.nn`,
with the same losses. Then a wide one, dense and with two layouts, in which a block of hidden units
keeps 8 of the 32 blocks of inputs, two to a letter.

Look at the parameters, and at the loss on text that was held out. With a random layout the wide
network is about as good as it was, and no larger than the narrow one. With a layout that knows the
task, the last two letters and four other blocks, it is better than both, after so little training.

Exercise: keep the first two letters in place of the last. Then take 3000 steps: who is ahead now?
"""

import os
from pathlib import Path

import numpy as np

import numbsparse as ns
from numbsparse import nn

WINDOW, LETTERS, BATCH, STEPS = 16, 64, 64, 200
NARROW, WIDE, LR, MOMENTUM = 160, 512, 0.3, 0.9

files = sorted(Path(os.__file__).parent.glob("*.py"))[:80]
text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
# The 63 most frequent bytes have numbers of their own, all others share the last.
rank = np.full(256, LETTERS - 1)
rank[np.argsort(-np.bincount(text, minlength=256))[: LETTERS - 1]] = np.arange(LETTERS - 1)
letters = rank[text]


def examples(starts):
    """Windows as ones among zeros, (n, WINDOW * LETTERS), and the letters after them."""
    ones = np.eye(LETTERS, dtype=np.float32)[letters[starts[:, None] + np.arange(WINDOW)]]
    return ones.reshape(len(starts), -1), letters[starts + WINDOW]


rng = np.random.default_rng(0)
end = int(0.9 * len(letters))  # what is before is learned from
batches = [examples(rng.integers(end - WINDOW, size=BATCH)) for _ in range(STEPS)]
held_out = examples(rng.integers(end, len(letters) - WINDOW, size=4000))


def by_hand(w1, b1, w2, b2):
    parameters, velocities, losses = [w1, b1, w2, b2], [0, 0, 0, 0], []
    for x, target in batches:
        hidden = np.maximum(x @ w1 + b1, 0)
        p = np.exp(hidden @ w2 + b2)
        p /= p.sum(axis=1, keepdims=True)
        losses.append(-np.log(p[np.arange(BATCH), target]).mean())
        p[np.arange(BATCH), target] -= 1
        d_scores = p / BATCH
        d_hidden = d_scores @ w2.T * (hidden > 0)
        gradients = x.T @ d_hidden, d_hidden.sum(0), hidden.T @ d_scores, d_scores.sum(0)
        velocities = [MOMENTUM * v + g for v, g in zip(velocities, gradients, strict=True)]
        for parameter, velocity in zip(parameters, velocities, strict=True):
            parameter -= LR * velocity  # in place
    return losses


def model_of(hidden, layout=None):
    first = nn.Linear(WINDOW * LETTERS, hidden, layout=layout, seed=0)
    return nn.Sequential(first, nn.ReLU(), nn.Linear(hidden, LETTERS, seed=1))


def train(model):
    """The loss of every step, as `by_hand`."""
    optimizer, losses = nn.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM), []
    for x, target in batches:
        loss = nn.functional.cross_entropy(model(x), target)
        model.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


chance, known = (ns.patterns.balanced_random(32, WIDE // 32, n, seed=0) for n in (8, 4))
known[-4:] = True  # the last two letters
models = {
    "narrow, dense": model_of(NARROW),
    "wide, dense": model_of(WIDE),
    "wide, by chance": model_of(WIDE, chance),
    "wide, last letters": model_of(WIDE, known),
}
narrow = (p.data for p in models["narrow, dense"].parameters())
start = [p.toarray() if isinstance(p, ns.BlockSparse) else p.copy() for p in narrow]
losses = [by_hand(*start)] + [train(model) for model in models.values()]
difference = abs(np.subtract(*losses[:2]))[:50].max()
print(f"the first 50 losses by hand and by ns.nn differ by {difference:.0e} at most")

bits = []
for name, model in models.items():
    bits.append(nn.functional.cross_entropy(model(held_out[0]), held_out[1]).item() / np.log(2))
    print(f"{name:18} {model.n_parameters():7,} parameters, {bits[-1]:.3f} bits per letter")
assert difference < 1e-4, f"by_hand and train differ by {difference}: do both take the same steps?"
assert bits[3] == min(bits), "`known` is not the best layout: which letters does it keep, how long?"
