"""PixelCNN++ sees no pixel before its turn; sparse and dense ones are of one size."""

import numpy as np
import pytest
from examples_helpers import imported
from pixel_helpers import options

import numbsparse as ns

SIDE = 8


@pytest.fixture
def model_module(monkeypatch):
    return imported(monkeypatch, "pixel_model")


@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_no_output_depends_on_its_pixel_or_a_later_one(model_module, rng, kind, stages):
    model = model_module.make_model(options(stages=stages, filters=16, deeper=1.5), kind)
    image = rng.uniform(-1, 1, (SIDE, SIDE, 4))
    images = np.repeat(image[None], SIDE**2 + 1, axis=0)
    pixels = images[1:].reshape(SIDE**2, SIDE**2, 4)
    pixels[np.arange(SIDE**2), np.arange(SIDE**2), :3] += 0.5  # in image k + 1, pixel k
    model_module.begin(model, ns.Tensor(images[:4]))
    with ns.no_grad():
        outputs = model(ns.Tensor(images)).numpy().reshape(SIDE**2 + 1, SIDE**2, -1)
    changed = abs(outputs[1:] - outputs[0]).max(axis=-1)
    changed_of, output_at = np.indices(changed.shape)
    assert changed[changed_of >= output_at].max() < 1e-12
    column = np.arange(SIDE**2) % SIDE
    beside = changed[np.arange(SIDE**2 - 1), np.arange(1, SIDE**2)][column[1:] > 0]
    below = changed[np.arange(SIDE**2 - SIDE), np.arange(SIDE, SIDE**2)]
    assert min(beside.min(), below.min()) > 1e-7
    if stages == 3:
        assert (changed[:-1, -1] > 0).mean() > 0.9  # the last pixel sees nearly all the image


@pytest.mark.parametrize(
    ("filters", "larger"),
    [(32, {"deeper": 2.0}), (48, {"deeper": 3.0}), (32, {"deeper": 1.0, "wider": 1.5})],
)
def test_the_sparse_model_has_as_many_parameters(model_module, filters, larger):
    given = options(filters=filters, block_size=8, dtype="float32", **larger)
    dense, sparse = (model_module.make_model(given, kind) for kind in ("dense", "sparse"))
    assert sparse.n_parameters() == pytest.approx(dense.n_parameters(), rel=0.01)
    assert sparse.blocks == round(given.deeper * dense.blocks)
    assert sparse.filters == given.wider * dense.filters
    assert sparse.wiring.kept < sparse.wiring.weights
    assert dense.wiring.kept == dense.wiring.weights


@pytest.mark.parametrize("larger", [{"deeper": 9.0}, {"deeper": 1.0, "wider": 0.5}], ids=str)
def test_sizes_that_no_density_fits_are_refused(model_module, larger):
    with pytest.raises(ValueError, match=r"--deeper .* and --wider .* take a density of"):
        model_module.make_model(options(filters=16, block_size=8, **larger), "sparse")


def test_every_output_begins_with_its_spread(model_module, rng):
    model = model_module.make_model(options(filters=16), "sparse")
    x = ns.Tensor(rng.uniform(-1, 1, (4, 16, 16, 4)))
    model_module.begin(model, x)
    found = {}

    def noted(convolution, x, forward=model_module.Convolution.forward):
        y = forward(convolution, x)
        found[convolution] = y.numpy()
        return y

    model_module.Convolution.forward, forward = noted, model_module.Convolution.forward
    try:
        model(x)
    finally:
        model_module.Convolution.forward = forward
    assert len(found) == sum(
        isinstance(m, model_module.Convolution) for _, m in model.named_modules()
    )
    for convolution, y in found.items():
        values = y.reshape(-1, y.shape[-1])
        np.testing.assert_allclose(values.mean(axis=0), 0, atol=1e-6)
        spread = values.std(axis=0)
        if isinstance(convolution.convolution, ns.nn.ConvTranspose2d):
            assert 0.5 < spread.mean() < 2
        else:
            np.testing.assert_allclose(spread, convolution.spread, rtol=1e-4)


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_samples_are_what_the_whole_network_draws(model_module, monkeypatch, kind):
    """Rows left out and features kept change nothing."""
    pixel_sample = imported(monkeypatch, "pixel_sample")
    monkeypatch.setattr(pixel_sample, "SIZE", side := SIDE // 2)
    given = options(filters=16, deeper=1.5, stages=2)
    model = model_module.make_model(given, kind)
    drawn = pixel_sample.sample(model, given)
    rng, images = np.random.default_rng(given.seed), np.zeros_like(drawn)
    with ns.no_grad():
        for i, j in np.ndindex(side, side):
            outputs = model(pixel_sample.placed(images, given)).numpy()
            outputs = outputs.reshape(len(images), side, side, -1)[:, i, j]
            images[:, i, j] = pixel_sample.draw_pixels(outputs, rng)
    np.testing.assert_array_equal(drawn, images)
