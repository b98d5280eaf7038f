"""Selectors by name."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.errors import PlanError
from slipstream.sparsify.selection import Selector


def _exact(seed: int) -> Selector:
    from slipstream.sparsify.exact import Exact

    return Exact()


def _mstopk(seed: int) -> Selector:
    from slipstream.sparsify.mstopk import MSTopK

    return MSTopK(seed)


def _sampled(seed: int) -> Selector:
    from slipstream.sparsify.sampled import Sampled

    return Sampled(seed)


def _reference(seed: int) -> Selector:
    from slipstream.sparsify.reference import Reference

    return Reference()


_MAKERS: dict[str, Callable[[int], Selector]] = {
    "exact": _exact,
    "mstopk": _mstopk,
    "sampled": _sampled,
    "reference": _reference,
}
SELECTORS = tuple(_MAKERS)


def selector(name: str = "exact", seed: int = 0, device_type: str = "cpu") -> Selector:
    """A new selector, for one thread at a time; loads its compiled kernels, or compiles them.

    seed: for those that draw at random. device_type: of the tensors; on "cuda" there is `exact`
    alone. Raises PlanError for a name that there is not, ImportError without Triton for a GPU.
    """
    if device_type != "cpu":
        return _on_gpu(name, device_type)
    if name not in _MAKERS:
        raise PlanError(f"There is no selector {name!r}; there are {', '.join(SELECTORS)}.")
    return _MAKERS[name](seed)


def _on_gpu(name: str, device_type: str) -> Selector:
    if (name, device_type) != ("exact", "cuda"):
        raise PlanError(
            f"There is no selector {name!r} on {device_type}; on cuda there is 'exact', and on the "
            f"CPU there are {', '.join(SELECTORS)}."
        )
    from slipstream.sparsify.exact_gpu import ExactOnGPU

    return ExactOnGPU()
