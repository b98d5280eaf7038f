"""What a model and a cluster are really like: steps -> Trace, collectives and links -> costs."""

from slipstream.measure.probing import OPERATIONS, SIZES, probe, probe_budgeted, ways_of
from slipstream.measure.profiling import Profiler, profile

__all__ = ["OPERATIONS", "SIZES", "Profiler", "probe", "probe_budgeted", "profile", "ways_of"]
