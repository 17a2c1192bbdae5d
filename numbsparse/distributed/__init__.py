"""Training on several cards: processes that sum gradients, each with a part of the batch.

Collectives are NCCL's, by the package nccl4py (`pip install 'numbsparse[dist]'`), MPI's, or, for a
few processes on CPUs and for tests, over sockets.
"""

from numbsparse.distributed.data_parallel import DataParallel
from numbsparse.distributed.group import Group
from numbsparse.distributed.sharded import ShardedOptimizer, save
from numbsparse.distributed.start import init
from numbsparse.distributed.watch import RankLost

__all__ = ["DataParallel", "Group", "RankLost", "ShardedOptimizer", "init", "save"]
