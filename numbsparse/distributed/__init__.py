"""Training on several cards: processes that sum gradients, each with a part of the batch, or that
each have a part of a layer.

Collectives are NCCL's, by the package nccl4py (`pip install 'numbsparse[dist]'`), MPI's, or, for a
few processes on CPUs and for tests, over sockets.
"""

from numbsparse.distributed.data_parallel import DataParallel
from numbsparse.distributed.group import Group
from numbsparse.distributed.links import RankLost
from numbsparse.distributed.sharded import ShardedOptimizer, save
from numbsparse.distributed.split import ColumnLinear, RowLinear, SplitLSTM
from numbsparse.distributed.start import init

__all__ = [
    "ColumnLinear",
    "DataParallel",
    "Group",
    "RankLost",
    "RowLinear",
    "ShardedOptimizer",
    "SplitLSTM",
    "init",
    "save",
]
