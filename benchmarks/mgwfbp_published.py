"""What others published about MG-WFBP, as data; docs/reproduction/mg-wfbp.md says where it is from.

Times are seconds, sizes bytes. WF: WFBP, one message a tensor; SE: SyncEASGD, a single message;
MG: MG-WFBP. Figures that nobody could check against a source are not here.
"""

from __future__ import annotations

from typing import NamedTuple

from slipstream.costs import Line, Link

# The simulator of B-Caffe (scripts/gmwfbp.py): one K80 card a node, 10GbE.
SIMULATOR_LINK = Link(
    latency_seconds=45.25e-6,
    seconds_per_byte=1.2 / (9.0 * 2**30 / 8),
    reduce_seconds_per_byte=2.5e-9,
)
# Its ring for N workers, a = 2 N alpha in the first release: worked out by hand from the constants.
RING_CONSTANTS = {
    2: (0.181e-3, 2.243e-9),
    4: (0.362e-3, 3.365e-9),
    8: (0.724e-3, 3.926e-9),
    16: (1.448e-3, 4.206e-9),
    32: (2.896e-3, 4.347e-9),
    64: (5.792e-3, 4.417e-9),
}

# a, b that the MG-WFBP code carries for 16 workers, fitted to messages of 32 KiB to 2 MiB.
SHIPPED_LINES = {
    "10GbE": Line(9.0810e-4, 7.3957e-10),
    "56Gb IB": Line(2.3584e-4, 4.0595e-10),
}


class Breakdown(NamedTuple):
    """Measured on V100s; bits: of the numbers that compute and travel; times of one iteration."""

    trace: str
    fabric: str
    bits: int
    compute: float
    wfbp: float
    single: float
    mgwfbp: float


# The arrays of the TPDS'21 authors' plotting script; the number of workers is not in it.
BREAKDOWNS = [
    Breakdown("resnet152", "10GbE", 32, 0.883, 1.233, 1.360, 1.126),
    Breakdown("resnet152", "10GbE", 16, 0.389, 0.757, 0.636, 0.630),
    Breakdown("resnet152", "56Gb IB", 32, 0.883, 1.082, 1.143, 1.089),
    Breakdown("resnet152", "56Gb IB", 16, 0.389, 0.531, 0.518, 0.486),
    Breakdown("inception_v4", "10GbE", 32, 0.611, 0.944, 0.900, 0.781),
    Breakdown("inception_v4", "10GbE", 16, 0.280, 0.591, 0.477, 0.423),
    Breakdown("inception_v4", "56Gb IB", 32, 0.611, 0.767, 0.746, 0.661),
    Breakdown("inception_v4", "56Gb IB", 16, 0.280, 0.430, 0.373, 0.364),
    Breakdown("densenet201", "10GbE", 32, 0.361, 0.764, 0.513, 0.457),
    Breakdown("densenet201", "10GbE", 16, 0.215, 0.614, 0.406, 0.362),
    Breakdown("densenet201", "56Gb IB", 32, 0.361, 0.512, 0.438, 0.406),
    Breakdown("densenet201", "56Gb IB", 16, 0.215, 0.398, 0.354, 0.331),
]


class Throughput(NamedTuple):
    """Measured on K80s over 10GbE, images a second a GPU.

    alone: of one node; images: by number of nodes, with WFBP, single and MG-WFBP.
    """

    trace: str
    batch: int
    alone: float
    images: dict[int, tuple[float, float, float]]


# B-Caffe's scripts/gmwfbp.py. GoogleNet ran on both GPUs of a card.
THROUGHPUTS = [
    Throughput(
        "googlenet",
        64,
        81.68,
        {2: (74.83, 62.57, 79.02), 4: (74.91, 57.67, 75.03), 8: (62.9, 55.58, 75.68)},
    ),
    Throughput(
        "resnet50",
        32,
        76.85,
        {2: (75.55, 60.0, 75.59), 4: (73.68, 55.7, 73.8), 8: (58.2, 50.8, 70.83)},
    ),
]


class Survey(NamedTuple):
    """Scaling efficiency in percent of 32 V100s, against `alone` samples a second of one."""

    trace: str
    batch: int
    alone: float
    fabric: str
    single: float
    wfbp: float
    mgwfbp: float


# The same group's survey of 2020 (ddl-benchmarks).
SURVEY = [
    Survey("resnet50", 64, 253.1, "10GbE TCP", 60.8, 63.1, 85.0),
    Survey("resnet50", 64, 253.1, "100GbE TCP", 70.9, 75.8, 93.1),
    Survey("resnet50", 64, 253.1, "100Gb IB", 88.0, 90.5, 97.2),
    Survey("bert_base", 64, 212.8, "10GbE TCP", 28.3, 29.6, 28.3),
    Survey("bert_base", 64, 212.8, "100GbE TCP", 41.3, 43.9, 52.0),
    Survey("bert_base", 64, 212.8, "100Gb IB", 61.4, 60.2, 72.5),
]


class Golden(NamedTuple):
    """The family in which the greedy rule is worst: a = b = 1, every gap and size 0.9."""

    tensors: int
    greedy: tuple[int, float]
    optimum: tuple[int, float]


# Buckets and end of communication; worked out apart from this code, not by the paper.
GOLDEN = [
    Golden(10, (1, 19.0), (4, 13.9)),
    Golden(50, (1, 91.0), (9, 55.4)),
    Golden(200, (1, 361.0), (19, 199.9)),
    Golden(1000, (1, 1801.0), (42, 943.4)),
]


class Simulated(NamedTuple):
    """A simulation apart from this code, with nothing but the architectures in common.

    steps: by wfbp, single, ddp, mgwfbp and the optimum; buckets: of the last two.
    """

    trace: str
    backward: float
    workers: int
    link: str
    steps: tuple[float, float, float, float, float]
    buckets: tuple[int, int]


INDEPENDENT_LINKS = {
    "10G": Link(latency_seconds=30e-6, seconds_per_byte=0.8e-9),
    "100G": Link(latency_seconds=10e-6, seconds_per_byte=0.1e-9),
}
INDEPENDENT = [
    Simulated("resnet50", 0.165, 16, "10G", (0.381, 0.402, 0.263, 0.248, 0.248), (7, 8)),
    Simulated("resnet50", 0.165, 64, "10G", (0.852, 0.412, 0.267, 0.265, 0.261), (4, 4)),
    Simulated("resnet50", 0.165, 256, "10G", (2.709, 0.426, 0.322, 0.426, 0.298), (1, 3)),
    Simulated("resnet50", 0.165, 1024, "10G", (10.13, 0.472, 0.553, 0.472, 0.390), (1, 2)),
    Simulated("resnet50", 0.165, 256, "100G", (0.924, 0.273, 0.255, 0.273, 0.253), (1, 23)),
    Simulated("resnet152", 0.589, 64, "10G", (2.439, 1.266, 0.908, 0.887, 0.887), (25, 47)),
    Simulated("resnet152", 0.589, 256, "10G", (7.823, 1.283, 0.920, 1.283, 0.899), (1, 13)),
    Simulated("resnet152", 0.589, 1024, "10G", (29.34, 1.330, 1.293, 1.330, 0.984), (1, 4)),
    Simulated("densenet201", 0.24, 64, "10G", (2.529, 0.490, 0.394, 0.364, 0.364), (8, 23)),
    Simulated("densenet201", 0.24, 256, "10G", (9.489, 0.503, 0.406, 0.446, 0.376), (2, 8)),
    Simulated("densenet201", 0.24, 1024, "10G", (37.3, 0.549, 0.494, 0.549, 0.442), (1, 3)),
    Simulated("vgg16", 0.25, 16, "10G", (0.984, 1.206, 0.961, 0.958, 0.958), (3, 3)),
    Simulated("vgg16", 0.25, 256, "10G", (1.497, 1.272, 1.099, 1.062, 1.040), (2, 2)),
    Simulated("vgg16", 0.25, 1024, "10G", (2.974, 1.321, 1.378, 1.321, 1.134), (1, 2)),
]
