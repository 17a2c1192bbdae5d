"""Every schedule, in any training, resumes from a checkpoint with its layouts, bit for bit."""

from functools import partial

import numpy as np
import pytest
from drawn import drawn, draws
from hypothesis import given
from hypothesis import strategies as st

import numbsparse as ns
from numbsparse import nn
from numbsparse.nn import functional as F
from numbsparse.nn import optim, utils

pytestmark = pytest.mark.usefixtures("cheap_products")

B, ROWS = 4, 6
OPTIMIZERS = {
    "SGD": partial(optim.SGD, lr=0.05),
    "Nesterov": partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": partial(optim.Adam, lr=0.01, betas=(0.8, 0.9), eps=1e-5),
    "AdamW": partial(optim.AdamW, lr=0.01, weight_decay=0.2),
}
SCHEDULES = {
    "none": None,
    "gradual pruning": partial(utils.GradualPruning, density=0.3, start=1, stop=9, every=2),
    "of a model": partial(utils.GradualPruning, density=0.3, stop=8, scope="model", by="max"),
    "RigL": partial(utils.Rewiring, grow="gradient", every=3, stop=9),
    "RigL, grown": partial(utils.Rewiring, every=2, stop=8, density=0.7, candidates=5),
    "SET": partial(utils.Rewiring, grow="random", every=2, by="l1"),
    "swaps": partial(utils.Rewiring, grow="degrees", every=2, fraction=0.6),
    "prune and grow": partial(utils.PruneAndGrow, density=0.3, every=2, stop=9),
    "hard concrete": partial(utils.HardConcrete, density=0.3, rate=2.0),
    "lasso": partial(utils.GroupLasso, density=0.3, growth=1.5),
}
SEEDED = ("RigL", "RigL, grown", "SET", "swaps", "prune and grow", "hard concrete")
FACTORS = {
    "schedule": list(SCHEDULES),
    "layers": ["two", "gated", "LSTM", "convolution", "a shared weight"],
    "optimizer": list(OPTIMIZERS),
    "groups": [1, 2],
    "rates": ["constant", "cosine", "one each"],
    "scale": [None, 4.0],
    "numbers": ["float32", "float64"],
    "file": ["state.npz", "state.safetensors"],
    "stop": range(10),
    "pruned": [False, True],  # at once, before the checkpoint
    "fresh": [False, True],  # whether what resumes was trained before
}


def allowed(case):
    """HardConcrete takes layers without gates; weights that compete may lose all blocks."""
    schedule, layers = case.get("schedule"), case.get("layers", "two")
    if schedule == "hard concrete":
        return layers in ("two", "a shared weight")
    return schedule != "of a model" or layers in ("two", "gated")


class Model(nn.Module):
    """Layers with dropout between, which draws too; another seed makes other layouts."""

    def __init__(self, layers, dtype, seed):
        super().__init__()
        how = {"block_size": B, "dtype": dtype}
        layout = ns.patterns.random(4, 4, 0.4 if seed else 0.6, seed=seed)
        linear = partial(nn.Linear, 16, 16, layout=layout, **how, gate=layers == "gated")
        self.first, self.drop = linear(seed=seed), nn.Dropout(0.25, seed=seed)
        self.middle = None
        if layers == "LSTM":
            self.middle = nn.LSTM(16, 16, layout=layout, **how, seed=seed)
        if layers == "convolution":
            self.middle = nn.Conv2d(16, 16, 3, padding=1, layout=layout, **how, seed=seed)
        self.last = self.first if layers == "a shared weight" else linear(seed=seed + 1)
        self.scale = nn.Parameter(np.ones((), dtype))

    def forward(self, x):
        x = self.drop(F.tanh(self.first(x)))
        if isinstance(self.middle, nn.LSTM):
            x = x + F.reshape(self.middle(F.reshape(x, (2, ROWS // 2, 16)))[0], (ROWS, 16))
        if isinstance(self.middle, nn.Conv2d):
            x = x + F.reshape(self.middle(F.reshape(x, (1, 2, ROWS // 2, 16))), (ROWS, 16))
        return self.last(x) * self.scale


class Training:
    """All that a training may consist of; `parts` are in the order in which they resume."""

    def __init__(self, case, seed):
        self.case, self.model = case, Model(case["layers"], case["numbers"], seed)
        make, name = SCHEDULES[case["schedule"]], case["schedule"]
        own = {"seed": seed} if name in SEEDED else {}
        concrete = name == "hard concrete"
        changing = make(self.model, **own) if concrete else None
        parameters = self.model.parameters()
        groups = [parameters[i :: case["groups"]] for i in range(case["groups"])]
        kind = OPTIMIZERS[case["optimizer"]]
        optimizer = kind([{"params": group} for group in groups])
        optimizer.param_groups[-1]["weight_decay"] = 0.03 * (seed == 0)  # the state's is to count
        average = optim.ExponentialMovingAverage(parameters, 0.5)
        self.followers = [optimizer, average]
        if make and not concrete:
            remap = {} if name == "lasso" else {"remap": self.followers}
            changing = make(self.model, **own, **remap)
        falling, rising = lambda step: optim.cosine(step, 12), lambda step: optim.warmup(step, 5)
        each = [falling, rising][: len(groups)]
        rates = {"constant": lambda step: 1.0, "cosine": falling, "one each": each}
        self.parts = {} if changing is None else {"changing": changing}
        self.parts |= {"model": self.model, "optimizer": optimizer, "average": average}
        self.parts["rates"] = optim.LambdaLR(optimizer, rates[case["rates"]])
        if case["scale"]:
            self.parts["scaler"] = optim.LossScaler(case["scale"], interval=2)

    def train(self, steps):
        parts, changing = self.parts, self.parts.get("changing")
        optimizer, scaler = parts["optimizer"], parts.get("scaler")
        concrete = isinstance(changing, utils.HardConcrete)
        rewires = isinstance(changing, utils.Rewiring)
        for step in steps:
            x = np.random.default_rng(step).standard_normal((ROWS, 16))
            x = x.astype(self.case["numbers"])
            loss = F.mse_loss(self.model(x), x)
            loss = loss + F.cast(changing.penalty(), loss.dtype) if concrete else loss
            self.model.zero_grad()
            (scaler.scale(loss) if scaler else loss).backward()
            if step % 2:
                self.model.scale.grad = None  # it counts steps of its own
            if rewires:
                changing.step()
            scaler.step(optimizer) if scaler else optimizer.step()
            if changing is not None and not rewires:
                changing.step()
            parts["average"].step()
            parts["rates"].step()

    def state(self):
        return {name: part.state_dict() for name, part in self.parts.items()}


def assert_same(got, right, name=""):
    assert type(got) is type(right), name
    if isinstance(right, dict):
        assert got.keys() == right.keys(), name
        for key in right:
            assert_same(got[key], right[key], f"{name}.{key}")
    elif isinstance(right, ns.BlockSparse):
        assert got.layout == right.layout, name
        np.testing.assert_array_equal(got.data, right.data, err_msg=name)
    else:
        np.testing.assert_equal(got, right, err_msg=name)


@draws(60, "schedules")
@given(case=drawn(FACTORS, allowed), end=st.integers(1, 4))
def test_a_training_resumes_bit_for_bit(case, end, tmp_path_factory):
    file = tmp_path_factory.mktemp("resumed") / case["file"]
    stop = case["stop"]
    whole, resumed = Training(case, 0), Training(case, 1)
    whole.train(range(stop))
    if case["pruned"]:
        utils.prune(whole.model, 0.5, remap=whole.followers)
    ns.save(file, whole.state())
    whole.train(range(stop, stop + end))
    if not case["fresh"]:
        resumed.train(range(20, 22))  # its state and layouts go
    state = ns.load(file)
    if "changing" not in state:  # then the layouts are set by hand, as the guide says
        for name, parameter in resumed.model.named_parameters():
            if isinstance(saved := state["model"][name], ns.BlockSparse):
                parameter.data = parameter.data.remap(saved.layout)
        for follower in resumed.followers:
            follower.remap()
    more = {"remap": resumed.followers} if case["schedule"] in ("lasso", "hard concrete") else {}
    for name, part in resumed.parts.items():
        part.load_state_dict(state[name], **(more if name == "changing" else {}))
    resumed.train(range(stop, stop + end))
    assert_same(resumed.state(), whole.state())
