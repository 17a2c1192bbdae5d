"""Rewiring over a training: resumed, pruned, captured; other layers, and what is refused."""

import numpy as np
import pytest
from rewiring_helpers import begun, flats, model_of, train, weights_of

import numbsparse as ns
from numbsparse import device, nn
from numbsparse.device import Capture
from numbsparse.nn import functional as F
from numbsparse.nn.utils import HardConcrete, PruneAndGrow, Rewiring, prune

pytestmark = pytest.mark.usefixtures("cheap_products")


@pytest.mark.parametrize("grow", ["gradient", "random", "degrees", "prune"])
@pytest.mark.parametrize("after", [4, 5, 6])  # 5: while candidates are there
def test_training_resumes_bit_for_bit(grow, after, tmp_path):
    how = {"every": 3, "stop": 20}
    how |= {"kind": PruneAndGrow, "density": 0.2} if grow == "prune" else {"grow": grow}
    parts, resumed = begun(**how), begun(first=0.6, **how)
    train(parts, range(after))
    ns.save(tmp_path / "state.npz", {name: part.state_dict() for name, part in parts.items()})
    train(parts, range(after, 10))
    train(resumed, range(20, 22))  # its state and layouts go
    resumed["rewiring"].seed = 5
    state = ns.load(tmp_path / "state.npz")
    for name, part in resumed.items():
        part.load_state_dict(state[name])
    train(resumed, range(after, 10))
    for name, part in parts.items():
        one, two = part.state_dict(), resumed[name].state_dict()
        assert one.keys() == two.keys()
        for key, value in one.items():
            other = two[key]
            if isinstance(value, ns.BlockSparse):
                assert value.layout == other.layout
                value, other = value.data, other.data
            np.testing.assert_equal(value, other, err_msg=f"{name}.{key}")
    broken = [{}, {**state["rewiring"], "steps": -1}, {**state["rewiring"], "layouts": {}}]
    for wrong in broken:
        with pytest.raises(ValueError, match="state"):
            resumed["rewiring"].load_state_dict(wrong)


def test_pruning_between_two_steps_is_followed():
    parts = begun(every=3, fraction=0.2)
    train(parts, range(2))
    prune(parts["model"], 0.3, remap=parts["rewiring"].remap)
    kept = [w.data.n_blocks for w in weights_of(parts["model"])]
    train(parts, range(2, 3))
    assert [w.data.n_blocks for w in weights_of(parts["model"])] <= kept


def test_new_gates_begin_as_gates_do():
    model = model_of(gate=True)
    for gate in (model[0].gate, model[2].gate):
        gate.data.values[:] = 0.5
    before = flats(model[0].weight)
    Rewiring(model, 0.5, grow="random", every=1, seed=0).step()
    assert model[0].gate.data.layout == model[0].weight.data.layout
    for flat, gate in zip(
        model[0].gate.data.layout.flat_indices, model[0].gate.data.values[:, 0, 0], strict=True
    ):
        assert gate == (0.5 if flat in before else 1)
    model = model_of()
    HardConcrete(model, 0.5)
    before = flats(model[0].weight)
    own = model[0].gate.log_alpha
    own.data.values[:] = -0.5
    Rewiring(model, 0.5, grow="random", every=1, seed=0).step()
    values = zip(own.data.layout.flat_indices, own.data.values[:, 0, 0], strict=True)
    assert all(value == (-0.5 if flat in before else 2) for flat, value in values)


@pytest.mark.parametrize(
    "make",
    [
        lambda: (nn.LSTM(6, 10, block_size=4, seed=0), (3, 2, 6)),
        lambda: (nn.Conv2d(3, 9, 3, block_size=4, seed=0), (2, 6, 6, 3)),
    ],
    ids=["LSTM", "Conv2d"],
)
def test_other_layers_are_rewired_too(make):
    model, shape = make()
    prune(model, 0.5)
    rewiring = Rewiring(model, every=2, seed=0)
    weights = [p for p in model.parameters() if isinstance(p.data, ns.BlockSparse)]
    before = [flats(p) for p in weights]
    for _ in range(2):
        y = model(np.random.default_rng(0).standard_normal(shape).astype(np.float32))
        model.zero_grad()
        F.sum(y if isinstance(y, ns.Tensor) else y[0]).backward()
        rewiring.step()
    for p, own in zip(weights, before, strict=True):
        assert len(flats(p)) == len(own)
        assert flats(p) != own


def test_a_shared_weight_is_rewired_once():
    first = nn.Linear(32, 32, layout=ns.patterns.random(8, 8, 0.4, seed=0), block_size=4)
    model = nn.Sequential(first, nn.ReLU(), first)
    before = flats(first.weight)
    Rewiring(model, 0.5, grow="random", every=1, seed=0).step()
    assert len(before - flats(first.weight)) == round(0.5 * len(before))
    other = nn.Linear(32, 32, block_size=4, layout=first.weight.data.layout)
    other.weight.data = first.weight.data
    with pytest.raises(ValueError, match=r"0\.weight and 1\.weight share their values in two"):
        Rewiring(nn.Sequential(first, other))


def test_what_cannot_be_rewired_is_refused():
    model = model_of()

    def refused(kind, words, *args, of=model, **how):
        with pytest.raises(kind, match=words):
            Rewiring(of, *args, **how)

    refused(ValueError, "fraction takes a number from 0 to 1, got 2", 2)
    refused(ValueError, "grow takes one of gradient, random, degrees, got 'all'", grow="all")
    refused(ValueError, "every takes an integer of at least 1", every=0)
    refused(ValueError, "by takes one of l1, l2, max", by="l0")
    refused(ValueError, "density takes a stop", density=0.5)
    refused(ValueError, "density takes a stop", density=0.5, stop=9, grow="degrees")
    refused(ValueError, r"density 0\.001 leaves 0\.weight none", density=0.001, stop=9)
    refused(ValueError, "candidates takes an integer of at least 1", candidates=0)
    refused(TypeError, "remap takes optimizers and averages", remap=[3])
    refused(ValueError, "with a block-sparse Parameter, got none", of=nn.ReLU())
    rewiring = Rewiring(model, every=2)
    rewiring.step()
    before = model[0].weight.data
    for _ in range(2):  # an error is not counted
        with pytest.raises(ValueError, match=r"0\.weight has no gradient of its candidates"):
            rewiring.step()
        assert rewiring.steps == 1
        assert model[0].weight.data is before
        model[0].weight.grad = ns.Tensor(before.remap(np.ones(before.layout.shape)))


def test_a_captured_step_changes_no_layout():
    if not device.is_available():
        pytest.skip(device.why_unavailable())
    model = model_of()
    schedules = [
        Rewiring(model, grow="random"),
        nn.utils.GradualPruning(model, 0.1, stop=5),
        PruneAndGrow(model, 0.1, stop=5),
        nn.utils.GroupLasso(model, 0.2),
    ]
    for schedule in schedules:
        with Capture().under_way(), pytest.raises(RuntimeError, match="part of a captured step"):
            schedule.step()
    assert schedules[0].steps == schedules[1].steps == schedules[2].steps == 0
    with Capture().under_way(), pytest.raises(RuntimeError, match="part of a captured step"):
        prune(model, 0.1)
