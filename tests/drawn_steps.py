"""Steps of optimizers in float64, and how far a computation of fewer digits may be off them."""

import numpy as np

BETAS = {"usual": (0.9, 0.999), "short": (0.5, 0.9), "none": (0.0, 0.0)}
OPTIONS = {  # kind, and whether it takes momentum, Nesterov's, decoupled decay
    "SGD": ("SGD", {}),
    "momentum": ("SGD", {"momentum": 0.9}),
    "Nesterov": ("SGD", {"momentum": 0.5, "nesterov": True}),
    "Adam": ("Adam", {}),
    "AdamW": ("AdamW", {}),
}


def options_of(case):
    """Keywords of the optimizer, as torch's has them too."""
    kind, options = OPTIONS[case["optimizer"]]
    options = options | {"weight_decay": case["decay"]}
    if kind != "SGD":
        options |= {"betas": BETAS[case["betas"]], "eps": case["eps"]}
    return kind, options


class Exact:
    """One parameter and its state; `off` are the bounds of errors of computing with `unit`.

    A computed a + b is off by at most a unit of |a| + |b|, and so on; all is carried through.
    """

    def __init__(self, p, unit):
        self.p, self.unit, self.t = p.astype(np.float64), unit, 0
        self.is_stepped = False  # since p was set
        self.off = {"p": np.zeros(p.shape), "m": np.zeros(p.shape), "v": np.zeros(p.shape)}
        self.m, self.v = np.zeros(p.shape), np.zeros(p.shape)

    def step(self, kind, lr, g, g_off, weight_decay=0.0, **options):
        self.t, self.is_stepped = self.t + 1, True
        off, unit = self.off, self.unit
        if kind != "AdamW":
            g_off = g_off + weight_decay * off["p"]
            g_off = g_off + 3 * unit * (abs(g) + abs(weight_decay * self.p))
            g = g + weight_decay * self.p
        if kind == "SGD":
            step, step_off = self.descent(g, g_off, **options)
        else:
            step, step_off = self.adam(g, g_off, **options)
        shrink = 1 - lr * weight_decay if kind == "AdamW" else 1.0
        off["p"] = shrink * off["p"] + lr * step_off
        off["p"] += 4 * unit * (abs(self.p) + lr * abs(step))
        self.p = shrink * self.p - lr * step

    def descent(self, g, g_off, momentum=0.0, nesterov=False):
        size = momentum * abs(self.m) + abs(g)
        self.m = momentum * self.m + g
        self.off["m"] = momentum * self.off["m"] + g_off + 3 * self.unit * size
        if not nesterov:
            return self.m, self.off["m"]
        size = abs(g) + momentum * abs(self.m)
        step_off = g_off + momentum * self.off["m"] + 3 * self.unit * size
        return g + momentum * self.m, step_off

    def adam(self, g, g_off, betas, eps):
        off, unit, (b1, b2) = self.off, self.unit, betas
        off["m"] = b1 * off["m"] + (1 - b1) * g_off
        off["m"] += 4 * unit * (b1 * abs(self.m) + (1 - b1) * abs(g))
        off["v"] = b2 * off["v"] + (1 - b2) * (2 * abs(g) + g_off) * g_off
        self.m, self.v = b1 * self.m + (1 - b1) * g, b2 * self.v + (1 - b2) * g * g
        off["v"] += 5 * unit * self.v
        m, v = self.m / (1 - b1**self.t), self.v / (1 - b2**self.t)
        m_off, v_off = off["m"] / (1 - b1**self.t), off["v"] / (1 - b2**self.t)
        root = np.sqrt(v) + eps
        # sqrt(v + d) is off by d / sqrt(v) at most, and by sqrt(d).
        with np.errstate(divide="ignore", invalid="ignore"):
            root_off = np.fmin(v_off / np.sqrt(v), np.sqrt(v_off)) + 4 * unit * root
            step = np.where(root > 0, m / root, 0)
            step_off = (m_off + abs(step) * root_off) / np.maximum(root - root_off, 0.5 * root)
        return step, np.where(root > 0, step_off, 0) + 4 * unit * abs(step)

    def remap(self, p, both):
        """Other values, and a state of the blocks that both layouts have."""
        self.is_stepped = False
        self.p, self.off["p"] = p.astype(np.float64), np.zeros(p.shape)
        for a in (self.m, self.v, self.off["m"], self.off["v"]):
            a *= both
