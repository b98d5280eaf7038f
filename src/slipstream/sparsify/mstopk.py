"""MSTopK, the public-cloud paper's approximate selection by several guesses of the threshold.

Shi et al., "Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters" (MLSys
2021). With a = |x|, it bisects for a threshold between mean(a) and max(a), `samplings` times, and
keeps the two thresholds that enclose k most tightly: thr1, which k1 <= k elements reach, and thr2,
which k2 > k reach. All k1 are taken, and the missing k - k1 as one run, with a random beginning,
of those between thr2 and thr1.

Where this differs from what is published, as that goes wrong:

- Until a threshold was found that at most k reach, none is sure (thr1 is infinite): published
  code begins with 0, and takes everything where all are equal.
- If fewer than k reach the mean, the bisection goes from 0 to the mean instead: otherwise the
  missing ones are any run of all elements.
- Every beginning of a run that has k - k1 elements can be drawn, and no other; published code can
  run over the end and select k - 1.
- The bisection ends as soon as exactly k reach a threshold: the selection is then exact.
- Data that is not finite has no mean to start from: it is selected exactly.
"""

from __future__ import annotations

import numpy as np
import torch

from slipstream.sparsify import threshold_kernels as kernels
from slipstream.sparsify.exact import Exact
from slipstream.sparsify.kernels import INFINITE, Ints
from slipstream.sparsify.selection import Selection, check, drawn, everything


class MSTopK:
    """The paper's selector; 10 samplings find 99.4 % and more of the k largest, 20 nearly all.

    seed: of the runs' beginnings; it should differ between ranks.
    """

    name = "mstopk"

    def __init__(self, seed: int = 0, samplings: int = 10) -> None:
        if samplings < 1:
            raise ValueError(f"MSTopK needs at least one sampling, not {samplings}.")
        self.seed = seed
        self.samplings = samplings
        self._exact = Exact()

    def select(self, values: torch.Tensor, k: int, draw: int = 0) -> Selection:
        """See `Selector`."""
        check(values, k)
        n = values.numel()
        if k == n:
            return everything(values)
        array = values.detach().numpy()
        bits = array.view(np.int32)
        total, most = kernels.total_and_most(array, bits)
        if most >= INFINITE:
            return self._exact.select(values, k)
        k1, size1, k2, size2 = self._enclose(bits, k, total / n, most)
        start = drawn(self.seed, draw, (k2 - k1) - (k - k1) + 1)
        return kernels.selected(array, bits, k, sure=size1, num_sure=k1, least=size2, start=start)

    def _enclose(self, bits: Ints, k: int, mean: float, most: int) -> tuple[int, int, int, int]:
        """k1 <= k and k2 >= k, each with the magnitude (as bits) that so many elements reach."""
        n, largest = len(bits), float(np.int32(most).view(np.float32))
        low, high = mean, largest
        k1, size1, k2, size2 = 0, int(INFINITE), n, 0
        at_mean, _ = kernels.num_reaching(bits, _bits_of(mean))
        if at_mean < k:
            low, high = 0.0, mean
            k1, size1 = at_mean, _bits_of(mean)
        else:
            k2, size2 = at_mean, _bits_of(mean)
        for _ in range(self.samplings):
            if k in (k1, k2):
                break
            middle = low + (high - low) / 2
            size = _bits_of(middle)
            reaching, _ = kernels.num_reaching(bits, size)
            if reaching <= k:
                high = middle
                if reaching > k1:
                    k1, size1 = reaching, size
            else:
                low = middle
                if reaching < k2:
                    k2, size2 = reaching, size
        return k1, size1, k2, size2


def _bits_of(magnitude: float) -> int:
    return int(np.float32(magnitude).view(np.int32))
