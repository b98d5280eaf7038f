"""The state of this process's random streams as named tensors, so that a resumed run draws on."""

import random
from collections.abc import Mapping

import numpy
import torch
from torch import Tensor

from slipstream.errors import CheckpointError

_NO_GAUSS = float("nan")


def capture_random_streams() -> dict[str, Tensor]:
    """Copies of the states of torch (CPU and the current CUDA device), Python and numpy.

    Each rank has its own: put them into TrainState.tensors as "rank0/torch", "rank1/torch", ...
    """
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    if version != 3 or name != "MT19937":
        raise CheckpointError(
            f"the random streams of Python (version {version}) or numpy ({name}) have a state that"
            " this version of Slipstream cannot save."
        )
    streams = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor(_NO_GAUSS if gauss is None else gauss, dtype=torch.float64),
        "numpy": torch.tensor([*map(int, keys), position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor(cached, dtype=torch.float64),
    }
    if torch.cuda.is_initialized():
        streams["cuda"] = torch.cuda.get_rng_state()
    return streams


def restore_random_streams(streams: Mapping[str, Tensor]) -> None:
    """Put this process's random streams where `capture_random_streams` found them.

    Raises CheckpointError if one is missing or damaged; then some streams may be set already.
    """
    try:
        gauss = float(streams["python_gauss"])
        words = tuple(streams["python"].tolist())
        random.setstate((3, words, None if gauss != gauss else gauss))
        *keys, position, has_gauss = streams["numpy"].tolist()
        cached = float(streams["numpy_gauss"])
        state = ("MT19937", numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached)
        numpy.random.set_state(state)
        if "cuda" in streams:
            torch.cuda.set_rng_state(streams["cuda"])
        torch.set_rng_state(streams["torch"])
    except (KeyError, ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise CheckpointError(
            f"the checkpoint's random streams cannot be used ({error}): resume from another"
            " checkpoint of the run."
        ) from error
