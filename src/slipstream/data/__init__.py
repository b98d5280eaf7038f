"""Input: image sets, global shuffling over ranks, augmentation, and batches prepared ahead."""

from slipstream.data.augment import Augment
from slipstream.data.batches import Batch, Batches, evaluation_batches
from slipstream.data.images import ImageSet, channel_statistics, normalise
from slipstream.data.load import DATASETS, load_images, prepare
from slipstream.data.prefetch import Prefetcher
from slipstream.data.sampler import EpochSampler, evaluation_indices

__all__ = [
    "DATASETS",
    "Augment",
    "Batch",
    "Batches",
    "EpochSampler",
    "ImageSet",
    "Prefetcher",
    "channel_statistics",
    "evaluation_batches",
    "evaluation_indices",
    "load_images",
    "normalise",
    "prepare",
]
