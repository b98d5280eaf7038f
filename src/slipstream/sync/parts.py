"""Steps an optimizer on some of its parameters at a time, all of them as of one moment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

Values = dict[str, Any]


class Parts:
    """An optimizer's step in parts, right for every optimizer that is separable by parameter.

    What `remember` has seen of the groups (the learning rate, but also counters that some
    optimizers keep there) is in force in every part, whatever a schedule has changed since; between
    the parts groups hold what the user sees.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups: dict[int, int] = {}
        self._seen: list[Values] = []
        self._remembered: list[Values] = []

    def remember(self) -> None:
        """Takes note of all groups: the step begins."""
        groups = self._optimizer.param_groups
        self._groups = {id(p): index for index, g in enumerate(groups) for p in g["params"]}
        self._seen = [_options(group) for group in groups]
        # schedules change a rate that is a tensor in place
        self._remembered = [{key: _copy(value) for key, value in s.items()} for s in self._seen]

    def others(self, managed: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The parameters of the optimizer that are none of `managed`."""
        known = {id(param) for param in managed}
        groups = self._optimizer.param_groups
        return [p for group in groups for p in group["params"] if id(p) not in known]

    def step(self, params: Iterable[torch.Tensor]) -> None:
        """Steps on these parameters alone; those that the optimizer does not hold are left out.

        Raises whatever the optimizer raises.
        """
        chosen: dict[int, list[torch.Tensor]] = {}
        for param in params:
            index = self._groups.get(id(param))
            if index is not None:
                chosen.setdefault(index, []).append(param)
        if not chosen:
            return
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        current = {index: dict(groups[index]) for index in chosen}
        try:
            for index, members in chosen.items():
                groups[index].update(self._remembered[index], params=members)
            optimizer.param_groups = [groups[index] for index in sorted(chosen)]
            optimizer.step()
        finally:
            optimizer.param_groups = groups
            for index, now in current.items():
                self._hand_back(index, groups[index], now)

    def _hand_back(self, index: int, group: Values, now: Values) -> None:
        """Gives the group its values back, except what the optimizer itself has moved on."""
        seen, remembered = self._seen[index], self._remembered[index]
        for key, value in now.items():
            moved = key in remembered and group[key] is not remembered[key]
            if not (moved and value is seen[key]):
                group[key] = value


def _options(group: Values) -> Values:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
