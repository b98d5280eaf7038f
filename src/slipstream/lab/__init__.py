"""An emulated cluster on one Linux machine: nodes with a network of a given rate between them."""

from slipstream.lab.counters import InterfaceBytes, interface_bytes
from slipstream.lab.result import LabResult
from slipstream.lab.run import LabInterrupted, run_lab
from slipstream.lab.settings import Cut, LabSettings
from slipstream.lab.units import parse_rate, parse_seconds

__all__ = [
    "Cut",
    "InterfaceBytes",
    "LabInterrupted",
    "LabResult",
    "LabSettings",
    "interface_bytes",
    "parse_rate",
    "parse_seconds",
    "run_lab",
]
