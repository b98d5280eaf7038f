"""Selection of k of n gradients by magnitude, and the residual of those that were not sent."""

from slipstream.sparsify.momentum import Momentum, Velocity
from slipstream.sparsify.residual import ErrorFeedback
from slipstream.sparsify.select import SELECTORS, selector
from slipstream.sparsify.selection import Selection, Selector, k_of

__all__ = [
    "SELECTORS",
    "ErrorFeedback",
    "Momentum",
    "Selection",
    "Selector",
    "Velocity",
    "k_of",
    "selector",
]
