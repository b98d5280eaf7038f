"""Collectives: averaging a flat tensor over the ranks of a group, at once or in two halves."""

from slipstream.comm.alone import Alone
from slipstream.comm.base import Collective, Halves
from slipstream.comm.chosen import Collectives
from slipstream.comm.halves import NativeHalves
from slipstream.comm.native import Native

__all__ = ["Alone", "Collective", "Collectives", "Halves", "Native", "NativeHalves"]
