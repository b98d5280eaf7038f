"""What a resumed run must have in common with its checkpoint, so that no sample is lost or doubled.

A run's place in its data is a number of epochs and steps. What samples those were follows from the
data set, the seed and the batch, and how they are dealt from the number of ranks.
"""

from collections.abc import Iterable
from pathlib import Path

from slipstream.errors import CheckpointError

DATASET = "data.dataset={}"
SEED = "train.seed={}"
BATCH = "{} samples a batch (train.global_batch_size)"
SAMPLES = "{} training samples"
RANKS = "{} ranks"


def require_same(checkpoint: Path, pairs: Iterable[tuple[str, object, object]]) -> None:
    """Raise CheckpointError unless what was at the time of the save is now, for every pair.

    pairs: words (one of this module's) with a place for the value, the value saved in `checkpoint`
    (None where it is not on record), and that of the run that is to go on.
    """
    for words, then, now in pairs:
        if then is not None and then != now:
            raise CheckpointError(
                f"checkpoint {checkpoint} was saved with {words.format(then)} and this job has"
                f" {now}: it would miss samples or see them twice. Resume with {then}, or train in"
                " a run of its own, without --resume."
            )
