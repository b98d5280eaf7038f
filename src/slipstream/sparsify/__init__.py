"""Selection of k of n gradients by magnitude, and the residual of those that were not sent."""

from slipstream.sparsify.residual import ErrorFeedback
from slipstream.sparsify.select import SELECTORS, selector
from slipstream.sparsify.selection import Selection, Selector, k_of

__all__ = ["SELECTORS", "ErrorFeedback", "Selection", "Selector", "k_of", "selector"]
