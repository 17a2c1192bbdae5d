"""Numbers that all of an LSTM's kernels share."""

import numpy as np

GATES = 4
WARPS = 4  # of a block of threads that streams a recurrent weight, that multiply

ONE = np.float32(1)
