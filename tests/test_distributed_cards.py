"""Ranks with a GPU each: gradients by NCCL, and a rank that is killed."""

from importlib.util import find_spec

import distributed_programs as programs
import numpy as np
import pytest
from distributed_helpers import run, values

from numbsparse import device


@pytest.fixture(autouse=True)
def two_gpus():
    if device.n_devices() < 2 or not find_spec("nccl"):
        pytest.skip("takes two GPUs and nccl4py")


@pytest.mark.gpu(reason="ranks take a GPU each")
def test_gradients_are_those_of_the_whole_batch():
    alone = programs.cards()
    one, other = values(run(programs.cards))
    np.testing.assert_array_equal(one, other)
    assert np.linalg.norm(one - alone) < 1e-5 * np.linalg.norm(alone)


@pytest.mark.gpu(reason="ranks take a GPU each")
@pytest.mark.parametrize("wait", ["GPU", "rank"])
@pytest.mark.parametrize("peer_memory", [False, True], ids=["gradients", "split LSTM"])
def test_a_gpu_waits_for_no_rank_that_was_killed(wait, peer_memory):
    first, second = run(programs.waiting, peer_memory, wait)
    assert second == ("died",)
    assert first == ("died",) or first[2].startswith("rank 1 ended without a word")


@pytest.mark.gpu(reason="ranks take a GPU each")
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("by", [(0,), (1,), (0, 1)])
def test_layouts_are_set_by_all_ranks_or_all_end(by, captured):
    ends = run(programs.layouts_set, by, captured, "cuda")
    if len(by) == 2:
        assert values(ends) == [16] * 2
    else:
        assert "set a layout before backward pass 5" in ends[by[0]][2]
