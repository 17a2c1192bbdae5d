"""Gates that learn to be zero: hard-concrete samples, and a penalty on how many are not."""

from math import log
from typing import Any

import numpy as np

from numbsparse import ops
from numbsparse.autograd import Tensor, fused, no_grad, record
from numbsparse.block_sparse import BlockSparse
from numbsparse.device import forget_captures
from numbsparse.kernels.rates import GAMMA, ZETA
from numbsparse.nn import functional as F
from numbsparse.nn import kept
from numbsparse.nn.dropout import Draws
from numbsparse.nn.functional.gates import numbers_of
from numbsparse.nn.linear import Linear, ones_for
from numbsparse.nn.module import Module, Parameter
from numbsparse.nn.utils.weights import Changing, weights_of
from numbsparse.patterns.checks import any_generator, number

BETA = 2 / 3  # the paper's temperature
FRESH = 2.0  # log alpha at first: a gate of 0.96 in evaluation


class HardConcreteGate(Draws):
    """A gate from 0 to 1 for each block of a weight: see `HardConcrete`, which makes them.

    In training z = min(1, max(0, s * (zeta - gamma) + gamma)), where s = sigmoid((log u -
    log(1 - u) + log_alpha) / beta) and u is drawn for each block and call; in evaluation s =
    sigmoid(log_alpha).
    """

    fresh = FRESH  # of new blocks

    def __init__(self, weight: BlockSparse, seed: int):
        super().__init__()
        self.log_alpha = Parameter(ones_for(weight, FRESH))
        self.seed = seed

    def forward(self) -> Tensor:
        if not self.training:
            return self.evaluated()
        logits = numbers_of(self.log_alpha)
        of = self.seed, self.next_call, logits.dtype, logits.device
        noise = ops.logistic_noise(logits.size, *of)
        return _stretched((logits + Tensor(noise)) / BETA)

    def evaluated(self) -> Tensor:
        """(n_blocks,), the gates in evaluation."""
        return _stretched(numbers_of(self.log_alpha))

    def expected(self) -> Tensor:
        """How many blocks are expected to have a gate that is not zero, in training."""
        return F.sum(F.sigmoid(numbers_of(self.log_alpha) - BETA * log(-GAMMA / ZETA)))


class HardConcrete(Changing):
    """Give all Linear layers of a model hard-concrete gates, and steer how many are not zero.

    loss + gates.penalty() is what to train: penalty = strength * max(0, expected density -
    density), an L0 norm of blocks in place of weights, which no longer pushes where it is reached.
    The strength begins at 0; each `step` adds rate * (expected density - density) to it, and it
    never falls below 0: gradient ascent on the Lagrangian.

    Parameters
    ----------
    model : Module, whose Linear layers have no gate yet; made before the optimizer, which trains
        the Parameters `gate.log_alpha` with the weights
    density : float, 0 to 1
        To steer to: blocks whose gate is not zero / blocks of the whole grids, counted by values.
    rate : float
        How fast the strength grows, in units of the loss.
    seed : int, optional

    Raises TypeError or ValueError for a model without such layers, and for other arguments.

    Notes
    -----
    `nn.utils.compact(model, remap=optimizer)` drops the blocks whose gate is zero in evaluation.
    Each training step draws other gates, and so another set of blocks to skip: a layout and a plan
    a step, but for a step that `ns.graph` captures: see `ns.matmul`; `step` may be part of it. To
    resume, load the state of this object before those of the model and of the optimizer.

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> from numbsparse import nn
    >>> model = nn.Sequential(nn.Linear(64, 64, block_size=8, seed=0))
    >>> gates = nn.utils.HardConcrete(model, density=0.25, seed=0)
    >>> optimizer = nn.optim.Adam(model.parameters(), lr=0.05)
    >>> x = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
    >>> for _ in range(150):  # what comes out is what goes in: eight blocks are enough
    ...     loss = nn.functional.mse_loss(model(x), ns.Tensor(x)) + gates.penalty()
    ...     model.zero_grad()
    ...     loss.backward()
    ...     optimizer.step()
    ...     gates.step()
    >>> nn.utils.compact(model, remap=optimizer)
    {'0.weight': 0.125}

    Louizos, Welling and Kingma, "Learning Sparse Neural Networks through L0 Regularization", 2017,
    equations 10 to 13; the strength as in Gallego-Posada et al., "Controlled Sparsity via
    Constrained Optimization", 2022.
    """

    numbers = (("strength", number),)

    def __init__(self, model: Module, density: float, *, rate: float = 0.1, seed: Any = None):
        self.density, self.rate = number("density", density, most=1), number("rate", rate)
        if not isinstance(model, Module):
            raise TypeError(f"model takes a Module, got {type(model).__name__}")
        found = [(n, layer) for n, layer in model.named_modules() if isinstance(layer, Linear)]
        if not found:
            raise ValueError("model takes a Module with Linear layers, got one without")
        owners: dict[int, str] = {}
        for name, layer in found:
            if layer.gate is not None:
                raise ValueError(f"{name or 'model'} has a gate: give layers without one")
            if "weight_v" in vars(layer):
                raise ValueError(
                    f"{name or 'model'} has weight_norm, whose lengths are of all blocks, also of "
                    "those that a gate would drop: give layers without it"
                )
            if (other := owners.setdefault(id(vars(layer).get("weight")), name)) != name:
                raise ValueError(
                    f"{other} and {name} share a weight, which two gates would part: put one layer "
                    "in both places"
                )
        weights_of(model)  # which refuses values that two Parameters share
        blocks = [layer.weight.data for _, layer in found]
        whole = sum(w.layout.shape[0] * w.layout.shape[1] * w.block_size**2 for w in blocks)
        least = sum(w.block_size**2 for w in blocks) / whole
        if self.density < least / 2:
            raise ValueError(
                f"density {density} leaves Linear layers no block: use {least:.3g} or more, one "
                "block for each, or a Module without some of them"
            )
        self.model, rng = model, any_generator(seed)
        self._layers = [layer for _, layer in found]
        for layer in self._layers:
            layer.gate = HardConcreteGate(layer.weight.data, int(rng.integers(2**31)))
            layer.gate.train(layer.training)
        self._strength: Any = np.zeros((), np.float32)

    @property
    def strength(self) -> float:
        """What the expected density is multiplied by now: copied from a GPU to be known."""
        return float(kept.on_cpu(self._strength))

    @strength.setter
    def strength(self, strength: float) -> None:
        self._strength = np.array(number("strength", strength), np.float32)
        forget_captures()

    def expected_density(self) -> Tensor:
        """The expected share of values in blocks whose gate is not zero: one number, of float32."""
        whole, total = 0, Tensor(ops.full((), 0.0, np.float32, self._layers[0].weight.device))
        for layer in self._layers:
            weight = layer.weight.data
            size, (rows, columns) = weight.block_size**2, weight.layout.shape
            whole += size * rows * columns
            total = total + F.cast(layer.gate.expected(), np.float32) * size
        return total / whole

    def penalty(self) -> Tensor:
        """strength * max(0, expected density - density), to be added to the loss, in float32."""
        # A copy: the next step may change the strength before `backward`.
        strength = Tensor(ops.copy(self._strength_here()))
        return F.relu(self.expected_density() - self.density) * strength

    def step(self) -> None:
        """Adapt the strength: call it after each step of the optimizer."""
        strength = self._strength_here()
        with no_grad():
            above = ops.subtract(self.expected_density().data, self.density)
        ops.copy_into(strength, ops.relu(ops.add(strength, ops.multiply(above, self.rate))))

    def _strength_here(self) -> Any:
        """Where the model is; steps change it in place, so that a captured one may."""
        device = self._layers[0].weight.device
        self._strength = kept.in_place_of(self._strength, device)
        return self._strength


def _stretched(logits: Tensor) -> Tensor:
    """min(1, max(0, sigmoid(logits) * (zeta - gamma) + gamma)), exactly 0 and 1 at its ends.

    In one launch, and one for the gradient: of ten and twelve of arithmetic a captured step of a
    layer of 8,192 features, blocks of 64 and 2,048 rows took 341 us of an H200, of these 323.
    """

    def again(dy: Tensor, y: Tensor) -> Tensor:
        ones = ops.full(logits.shape, 1.0, logits.dtype, logits.device)
        s, inside = F.sigmoid(logits), ops.stretched_sigmoid_grad(logits.data, ones)
        inside = ops.multiply(ops.relu_grad(inside, ones), ZETA - GAMMA)
        return dy * Tensor(inside) * s * (1.0 - s)

    vjp = fused(lambda dy, y: ops.stretched_sigmoid_grad(logits.data, dy), again)
    return record(ops.stretched_sigmoid(logits.data), (logits, vjp))
