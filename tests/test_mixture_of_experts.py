"""examples/mixture_of_experts.py: the layer is a loop over experts, and the program runs."""

import numpy as np
import pytest
from examples_helpers import imported, write_text

import numbsparse as ns
from numbsparse.nn import functional as F


@pytest.fixture
def example(monkeypatch):
    return imported(monkeypatch, "mixture_of_experts")


@pytest.mark.parametrize("tokens", [1, 13, 32])
def test_tokens_of_an_expert_have_rows_of_their_own(example, tokens, rng):
    chosen = rng.choice([0, 1, 3], tokens)  # expert 2 has none
    to = example.routes(chosen, 4, 2, 4, np)
    np.testing.assert_array_equal(to.token_of[to.row_of], np.arange(tokens))
    kept = to.layout.to_host().pattern
    for expert in range(4):
        own = np.unique(to.row_of[chosen == expert] // 4)
        assert own.size == -(-np.count_nonzero(chosen == expert) // 4)
        for column in (2 * expert, 2 * expert + 1):
            np.testing.assert_array_equal(np.flatnonzero(kept[:, column]), own)


def test_the_layer_is_a_loop_over_experts(example, rng):
    layer = example.MixtureOfExperts(8, 12, 3, 4, seed=0)
    x = ns.Tensor(rng.standard_normal((13, 8)).astype(np.float32), requires_grad=True)
    dy = rng.standard_normal(x.shape).astype(np.float32)
    y, balance = layer(x)
    F.sum(F.multiply(y, dy)).backward()
    wide = [a.astype(np.float64) for a in (x.numpy(), dy, layer.w1.numpy(), layer.w2.numpy())]
    router = layer.router.weight.data.toarray().astype(np.float64)
    p = np.exp(wide[0] @ router)
    p /= p.sum(1, keepdims=True)
    chosen = p.argmax(1)
    right, dx, dp, dw1, dw2 = example.one_by_one(*wide[:2], p, *wide[2:], chosen)
    dscores = p * (dp - (p * dp).sum(1, keepdims=True))
    np.testing.assert_allclose(y.numpy(), right, atol=1e-5)
    for got, wanted in (
        (x.grad.numpy(), dx + dscores @ router.T),
        (layer.w1.grad.numpy(), dw1),
        (layer.w2.grad.numpy(), dw2),
        (layer.router.weight.grad.data.toarray(), wide[0].T @ dscores),
    ):
        np.testing.assert_allclose(got, wanted, atol=1e-5)
    shares = np.bincount(chosen, minlength=3) / 13
    assert balance.item() == pytest.approx(3 * (p.mean(0) * shares).sum(), rel=1e-5)


def test_the_program_learns(example, tmp_path, capsys):
    small = ["--width", "16", "--context", "4", "--hidden", "16", "--experts", "3"]
    small += ["--block-size", "8", "--tokens", "64", "--steps", "60", "--lr", "0.02"]
    bits = example.main([*small, "--text", write_text(tmp_path)])
    assert sorted(bits) == ["dense", "experts"]
    assert max(bits.values()) < 3  # 16 characters are 4 bits; the words are far fewer
    assert "blocks of (11, 6)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--hidden", "40"], "--hidden takes multiples"),
        (["--width", "9"], "--width takes"),
        (["--seed", "-1"], "argument --seed: takes a whole number from 0 on, got -1"),
    ],
)
def test_the_program_refuses(example, wrong, said, capsys):
    with pytest.raises(SystemExit):
        example.main(wrong)
    assert said in capsys.readouterr().err


def test_what_fails_later_is_said_in_a_sentence(example):
    with pytest.raises(SystemExit, match=r"mixture_of_experts: .* got no-such-file"):
        example.main(["--steps", "1", "--text", "no-such-file"])


@pytest.mark.parametrize("text", ["a", "ab" * 10])
def test_a_text_too_short_for_the_context_is_refused(example, text, tmp_path):
    (tmp_path / "short.txt").write_text(text)
    with pytest.raises(SystemExit, match="mixture_of_experts: --text takes one of which 9 bytes"):
        example.main(["--text", str(tmp_path / "short.txt")])


def test_what_is_timed_in_torch_agrees(monkeypatch):
    torch = pytest.importorskip("torch")
    times = imported(monkeypatch, "mixture_times")
    size = 40, 5, 16, 8  # the last tokens fill no block
    ours, _, loop = times.layers(size, 4, "cpu", torch.float32).values()
    assert loop()[0].shape == (40, 16)
    assert ours()[0].shape == (60, 16)
    with pytest.raises(IsADirectoryError):  # before anything is timed
        times.main(["--json", "."])
    wrong = [*loop()[:3], 1.1 * loop()[3]]
    with pytest.raises(ArithmeticError, match=r"ours: dw2 is off by 0\.1"):
        times.check("ours", wrong, loop())
