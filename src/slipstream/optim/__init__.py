"""Optimisation: learning rates over time (`schedules`, which needs no torch)."""
