"""A model of what a step costs on many cards, from what was measured of one and of two."""

from math import ceil, log2

from numbsparse.patterns.checks import integer, number

NVLINK = 326e9  # bytes a second of NCCL's all-reduce between H200s of one host, measured
NETWORK = 45e9  # of a card's share of its host's network: 400 Gb/s, less a tenth
LATENCY = 19e-6  # seconds of a hop in a host: half of an all-reduce of 4 KiB between two cards
HOP = 15e-6  # between hosts


def step_seconds(
    compute: float,
    nbytes: int,
    ranks: int,
    *,
    overlapped: float = 0.0,
    per_host: int = 8,
    nvlink: float = NVLINK,
    network: float = NETWORK,
) -> float:
    """The seconds of a data-parallel step: those of one card, and of the reduction what shows.

    Rings within each host sum `nbytes` of gradients and hand each of its p cards a p-th, which
    rings between the h hosts sum, and the way back. With n = nbytes::

        all_reduce = 2 (p - 1) / p * n / nvlink + 2 (h - 1) / h * n / p / network + hops
        step = compute + max(all_reduce - overlapped, 0)

    Parameters
    ----------
    compute : float, seconds of a step on one card, with its own part of the batch
    nbytes : int, of the gradients that are reduced
    ranks : int, cards
    overlapped : float, seconds of the backward pass that go on beside the reduction
    per_host : int, cards of a host
    nvlink, network : float, bytes a second of each card, in its host and between hosts

    Raises ValueError for numbers below 0, or no rank.

    >>> [round(n * 6.3e-3 / step_seconds(6.3e-3, 90_000_000, n), 1) for n in (1, 64)]
    [1.0, 54.3]

    Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH",
    2005.
    """
    integer("ranks", ranks, least=1)
    integer("per_host", per_host, least=1)
    for name, value in (("compute", compute), ("nbytes", nbytes), ("overlapped", overlapped)):
        if number(name, value) < 0:
            raise ValueError(f"{name} takes a number from 0 on, got {value}")
    inside, hosts = min(ranks, per_host), ceil(ranks / per_host)
    all_reduce = 2 * (inside - 1) / inside * nbytes / nvlink
    all_reduce += 2 * (hosts - 1) / hosts * nbytes / inside / network
    all_reduce += 2 * LATENCY * ceil(log2(inside)) + 2 * HOP * ceil(log2(hosts))
    return compute + max(all_reduce - overlapped, 0.0)
