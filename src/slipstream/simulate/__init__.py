"""Simulated steps: a trace, costs and a plan become a timeline (no torch here)."""

from slipstream.simulate.picture import LEGEND, picture
from slipstream.simulate.plot import plot_kind, plot_scaling
from slipstream.simulate.scaling import (
    DEFAULT_PLANNERS,
    Allowed,
    PlannerChoice,
    ScalingRow,
    Scenario,
    cluster_of,
    scenarios,
    simulate_scaling,
)
from slipstream.simulate.shipped import load_trace, shipped_traces
from slipstream.simulate.step import Journey, Span, StepSimulation, simulate_step
from slipstream.simulate.timeline import chrome_trace
from slipstream.simulate.variation import Percentiles, Variation, draw_steps, slowest_ranks

__all__ = [
    "DEFAULT_PLANNERS",
    "LEGEND",
    "Allowed",
    "Journey",
    "Percentiles",
    "PlannerChoice",
    "ScalingRow",
    "Scenario",
    "Span",
    "StepSimulation",
    "Variation",
    "chrome_trace",
    "cluster_of",
    "draw_steps",
    "load_trace",
    "picture",
    "plot_kind",
    "plot_scaling",
    "scenarios",
    "shipped_traces",
    "simulate_scaling",
    "simulate_step",
    "slowest_ranks",
]
