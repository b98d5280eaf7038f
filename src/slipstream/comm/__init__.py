"""Collectives: averaging a flat tensor over the ranks of a group."""

from slipstream.comm.alone import Alone
from slipstream.comm.base import Collective
from slipstream.comm.native import Native

__all__ = ["Alone", "Collective", "Native"]
