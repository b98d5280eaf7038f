"""Selection by a threshold from a sample, as in Deep Gradient Compression.

Lin et al., "Deep Gradient Compression" (ICLR 2018), and its authors' code: the threshold that the
given share of a regular sample reaches (1 % of the elements, at least 2 / density). If more than
1.3 k elements reach it, the k largest of those are found exactly; if fewer than 0.8 k, it is
lowered by a fifth, ten times at most.

Where this differs: it always selects k. The threshold is lowered until k elements reach it, not
0.8 k, and after ten times it is 0. And of up to 1.3 k elements a run of k is taken, with a random
beginning: published code always drops the last ones, so that the end of a model is never sent.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from slipstream.sparsify import kernels, threshold_kernels
from slipstream.sparsify.exact import Exact
from slipstream.sparsify.selection import Selection, check, drawn, everything

SAMPLED_SHARE = 0.01
MOST_ROUNDS = 10
LOWERED_BY = 0.8
TOO_MANY = 1.3


class Sampled:
    """DGC's selector. seed: of the sample's and the runs' beginnings."""

    name = "sampled"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._exact = Exact()

    def select(self, values: torch.Tensor, k: int, draw: int = 0) -> Selection:
        """See `Selector`."""
        check(values, k)
        n = values.numel()
        if k == n:
            return everything(values)
        array = values.detach().numpy()
        bits = array.view(np.int32)
        size = self._threshold(bits, k, draw)
        reaching, most = threshold_kernels.num_reaching(bits, size)
        for _ in range(MOST_ROUNDS):
            if reaching >= k:
                break
            size = int((np.int32(size).view(np.float32) * np.float32(LOWERED_BY)).view(np.int32))
            reaching, most = threshold_kernels.num_reaching(bits, size)
        if reaching < k:
            size, reaching = 0, n
        if reaching > TOO_MANY * k or most >= kernels.INFINITE:
            return self._exact.select(values, k)
        start = drawn(self.seed, draw, reaching - k + 1)
        return threshold_kernels.selected(
            array, bits, k, sure=int(kernels.INFINITE), num_sure=0, least=size, start=start
        )

    def _threshold(self, bits: kernels.Ints, k: int, draw: int) -> int:
        """The magnitude that a share k / n of a regular sample reaches, as bits."""
        n = len(bits)
        num = min(n, max(math.ceil(SAMPLED_SHARE * n), math.ceil(2 * n / k)))
        stride = n // num
        sample = bits[drawn(self.seed, draw, stride) :: stride] & kernels.MAGNITUDE
        rank = max(1, round(len(sample) * k / n))
        return int(kernels.kth_largest(sample, len(sample), rank))
