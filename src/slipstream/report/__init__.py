"""The report of a run: one HTML file that needs no network, no script and no torch."""

from slipstream.report.build import build_report
from slipstream.report.environment import environment

__all__ = ["build_report", "environment"]
