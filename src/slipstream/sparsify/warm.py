"""Compiles all CPU kernels and keeps them: `python -m slipstream.sparsify.warm`.

Worth running once after an installation, for a job's first ranks otherwise wait while one of them
compiles.
"""

from __future__ import annotations

import time


def warm() -> float:
    """Makes sure that all kernels are compiled; returns how many seconds that took."""
    begin = time.perf_counter()
    from slipstream.sparsify import kernels, threshold_kernels

    assert kernels and threshold_kernels
    return time.perf_counter() - begin


if __name__ == "__main__":
    print(f"The CPU kernels of selection are compiled and kept ({warm():.1f} s).")
