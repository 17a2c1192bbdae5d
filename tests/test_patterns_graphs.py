"""Small-world and scale-free patterns against NetworkX and brute force; how signals spread."""

import math
import random
from fractions import Fraction

import numpy as np
import pytest

from numbsparse import patterns
from numbsparse.patterns import mixing, scale_free


def test_watts_strogatz_without_rewiring_is_networkx():
    nx = pytest.importorskip("networkx")
    for n, m in [(3, 1), (10, 4), (11, 5), (30, 2)]:
        ring = nx.to_numpy_array(nx.watts_strogatz_graph(n, 2 * m, 0), dtype=bool)
        ours = patterns.watts_strogatz(n, m, 0, seed=0)
        assert np.array_equal(ours, ring | np.eye(n, dtype=bool))


def networkx_watts_strogatz(nx, n, m, p, seed):
    graph = nx.watts_strogatz_graph(n, 2 * m, p, seed=seed)
    return nx.to_numpy_array(graph, dtype=bool) | np.eye(n, dtype=bool)


def networkx_barabasi_albert(nx, n, m, seed):
    # Unit m joined to units 0 ... m - 1, in the order that networkx numbers later units.
    start = nx.empty_graph(m)
    start.add_edges_from((m, leaf) for leaf in range(m))
    graph = nx.barabasi_albert_graph(n, m, seed=seed, initial_graph=start)
    pattern = nx.to_numpy_array(graph, nodelist=range(n), dtype=bool) | np.eye(n, dtype=bool)
    pattern[:m, :m] = True
    return pattern


GRAPHS = [
    pytest.param(networkx_watts_strogatz, patterns.watts_strogatz, (100, 3, 0.05), id="ws-0.05"),
    pytest.param(networkx_watts_strogatz, patterns.watts_strogatz, (100, 3, 0.3), id="ws-0.3"),
    pytest.param(networkx_watts_strogatz, patterns.watts_strogatz, (101, 2, 1.0), id="ws-1"),
    pytest.param(networkx_watts_strogatz, patterns.watts_strogatz, (24, 10, 0.9), id="ws-tight"),
    pytest.param(networkx_barabasi_albert, patterns.barabasi_albert, (160, 5), id="ba-5"),
    pytest.param(networkx_barabasi_albert, patterns.barabasi_albert, (150, 1), id="ba-1"),
    pytest.param(networkx_barabasi_albert, patterns.barabasi_albert, (40, 20), id="ba-20"),
]


def clustering(pattern):
    """Of the pairs of neighbours of a unit, the share that are neighbours themselves; mean."""
    a = (pattern & ~np.eye(len(pattern), dtype=bool)).astype(float)
    degree = a.sum(axis=1)
    closed = np.einsum("ij,jk,ki->i", a, a, a, optimize=True)
    return np.mean(closed / np.maximum(degree * (degree - 1), 1))


STATISTICS = {
    "largest degree": lambda pattern: pattern.sum(axis=0).max(),
    "degree variance": lambda pattern: pattern.sum(axis=0).var(),
    "degree of unit 0": lambda pattern: pattern[0].sum(),
    "degree of the last unit": lambda pattern: pattern[-1].sum(),
    "clustering": clustering,
    "reached in two steps": lambda pattern: (pattern.astype(int) @ pattern > 0).mean(),
}


@pytest.mark.slow
@pytest.mark.parametrize(("networkx_make", "make", "args"), GRAPHS)
def test_graphs_agree_with_networkx(networkx_make, make, args):
    nx = pytest.importorskip("networkx")
    theirs = [networkx_make(nx, *args, seed=seed) for seed in range(40)]
    ours = [make(*args, seed=seed) for seed in range(40)]
    assert {p.sum() for p in ours} == {p.sum() for p in theirs}

    # Two-sample Kolmogorov-Smirnov: a statistic beyond this has a probability under 1e-6.
    degrees = [np.sort(np.concatenate([p.sum(axis=0) for p in group])) for group in (ours, theirs)]
    values = np.arange(degrees[0].max() + 1)
    cumulative = [np.searchsorted(d, values, side="right") / d.size for d in degrees]
    bound = math.sqrt(-math.log(1e-6 / 2) / 2 * 2 / degrees[0].size)
    assert np.abs(cumulative[0] - cumulative[1]).max() < bound

    for name, statistic in STATISTICS.items():
        a, b = ([statistic(p) for p in group] for group in (ours, theirs))
        deviation = math.sqrt((np.var(a) + np.var(b)) / 40)
        assert abs(np.mean(a) - np.mean(b)) <= 5 * deviation + 1e-12, name


def test_rewiring_shortens_paths_before_it_undoes_clusters():
    ring, small, loose = (patterns.watts_strogatz(200, 4, p, seed=0) for p in (0.0, 0.05, 1.0))
    length = patterns.mean_path_length
    assert length(loose) < length(small) < 0.4 * length(ring)
    assert clustering(small) > 0.8 * clustering(ring)
    assert clustering(loose) < 0.1 * clustering(ring)


def grow_by_hand(in_blocks, out_blocks, m, seed):
    """`barabasi_albert_rectangular` as its docstring tells it, a block at a time."""
    rng = random.Random(seed)
    blocks = {(i, j) for i in range(m) for j in range(m)}
    arrivals = [(Fraction(2 * k + 1, in_blocks - m), 1, k + m) for k in range(in_blocks - m)]
    arrivals += [(Fraction(2 * k + 1, out_blocks - m), 0, k + m) for k in range(out_blocks - m)]
    for _, is_row, line in sorted(arrivals):
        # A column (row) that has k blocks stands k times in the hat.
        hat = sorted(block[is_row] for block in blocks)
        drawn: set[int] = set()
        while len(drawn) < m:
            drawn.add(rng.choice(hat))
        blocks |= {(line, other) if is_row else (other, line) for other in drawn}
    pattern = np.zeros((in_blocks, out_blocks), dtype=bool)
    pattern[tuple(np.array(sorted(blocks)).T)] = True
    return pattern


@pytest.mark.parametrize(("in_blocks", "out_blocks", "m"), [(40, 40, 2), (20, 60, 3), (50, 12, 4)])
def test_barabasi_albert_rectangular_agrees_with_brute_force(in_blocks, out_blocks, m):
    ours, theirs = (
        [make(in_blocks, out_blocks, m, seed=seed) for seed in range(60)]
        for make in (patterns.barabasi_albert_rectangular, grow_by_hand)
    )
    for pattern in ours:
        assert pattern[:m, :m].all()
        assert pattern.sum(axis=0).min() >= m
        assert pattern.sum(axis=1).min() >= m
    statistics = {
        "first row": lambda p: p[0].sum(),
        "first column": lambda p: p[:, 0].sum(),
        "row variance": lambda p: p.sum(axis=1).var(),
        "column variance": lambda p: p.sum(axis=0).var(),
        "middle row": lambda p: p[in_blocks // 2].sum(),
        "middle column": lambda p: p[:, out_blocks // 2].sum(),
    }
    for name, statistic in statistics.items():
        a, b = ([statistic(p) for p in group] for group in (ours, theirs))
        deviation = math.sqrt((np.var(a) + np.var(b)) / 60)
        assert abs(np.mean(a) - np.mean(b)) <= 5 * deviation + 1e-12, name


def brute_force_mixing_steps(pattern):
    power = pattern.astype(int)
    for steps in range(1, (len(pattern) - 1) ** 2 + 2):
        if power.all():
            return steps
        power = (power @ pattern > 0).astype(int)
    return math.inf


def test_mixing_steps_agrees_with_brute_force():
    found = set()
    for seed in range(300):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(1, 8))
        pattern = rng.random((n, n)) < rng.uniform(0.1, 0.9)
        expected = brute_force_mixing_steps(pattern)
        assert patterns.mixing_steps(pattern) == expected
        found.add(expected)
    assert found >= {1, 2, 3, 4, 5, math.inf}


@pytest.mark.parametrize("n", [2, 3, 5, 16])
def test_mixing_steps_of_wielandts_pattern(n):
    """The pattern that takes longest of all: a cycle with one shortcut."""
    pattern = np.roll(np.eye(n, dtype=bool), 1, axis=1)
    assert patterns.mixing_steps(pattern) == math.inf
    pattern[n - 1, min(1, n - 1)] = True
    assert patterns.mixing_steps(pattern) == (n - 1) ** 2 + 1


def test_mixing_steps_with_a_diagonal_is_the_diameter():
    nx = pytest.importorskip("networkx")
    for seed in range(5):
        pattern = patterns.watts_strogatz(80, 2, 0.1, seed=seed)
        diameter = nx.diameter(nx.from_numpy_array(pattern.astype(int)))
        assert patterns.mixing_steps(pattern) == diameter


@pytest.mark.parametrize("slab_bytes", [mixing.SLAB_BYTES, 1], ids=["one slab", "slabs of 64"])
def test_mean_path_length_agrees_with_networkx(monkeypatch, slab_bytes):
    nx = pytest.importorskip("networkx")
    monkeypatch.setattr(mixing, "SLAB_BYTES", slab_bytes)
    connected = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(2, 150))
        pattern = rng.random((n, n)) < 5 / n
        graph = nx.from_numpy_array(pattern.astype(int), create_using=nx.DiGraph)
        if nx.is_strongly_connected(graph):
            connected += 1
            expected = nx.average_shortest_path_length(graph)
            assert patterns.mean_path_length(pattern) == pytest.approx(expected, rel=1e-12)
        else:
            assert patterns.mean_path_length(pattern) == math.inf
    assert 3 < connected < 27


def test_a_single_unit():
    assert patterns.mixing_steps([[1]]) == 1
    assert patterns.mixing_steps([[0]]) == math.inf
    assert patterns.mean_path_length([[0]]) == 0


def test_small_world_of_the_launch_post():
    """A 2-D Watts-Strogatz network of over a thousand units, under five steps across."""
    grid = patterns.watts_strogatz_2d(32, 32, 4, 0.0, seed=0)
    small_world = patterns.watts_strogatz_2d(32, 32, 4, 0.2, seed=0)
    assert patterns.mean_path_length(grid) > 10
    assert patterns.mean_path_length(small_world) < 5
    assert patterns.mixing_steps(small_world) < patterns.mixing_steps(grid) / 2


@pytest.mark.parametrize("m", [1, 2, 3])
def test_those_of_the_largest_weights_are_drawn(m, rng):
    """So much larger that the others never are, wherever they stand."""
    for _ in range(50):
        heavy = rng.permutation(400)[:m]
        weights = np.ones(400)
        weights[heavy] = 1e15
        assert set(scale_free._draw(weights, m, rng)) == set(heavy)
