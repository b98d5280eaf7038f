"""Groups over parts of a group's ranks, for collectives that are made of a backend's pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from slipstream.comm.hanging_up import hang_up
from slipstream.comm.torch_comm import backend_of, destroy_group
from slipstream.errors import PlanError, RankFailure

Make = Callable[[Sequence[int]], "dist.ProcessGroup | None"]
"""Makes a group over some ranks, called by all ranks of the parent; None on those outside."""


class Subgroups:
    """The groups over parts of one group's ranks, each made once.

    device: where their tensors are. make: how one is made; None takes torch.distributed's own,
    which all ranks of the job enter together, so that the parent must be over all of them. All
    ranks of the parent ask for the same teams in the same order.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, make: Make | None = None
    ) -> None:
        self.group = group
        self._device = device
        self._make = make
        self._made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def mine(self, teams: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        """The group over this rank's team; None where it has no team, or is alone in it.

        teams: ranks of the parent, increasing, each in one team at most. All their groups are made,
        those of other ranks too. The team of all ranks is the parent itself. Raises PlanError for
        a parent that is not over all ranks of the job, RankFailure when a rank does not come.
        """
        found = None
        for team in map(tuple, teams):
            is_mine = self.group.rank() in team
            if len(team) == 1:
                continue
            if len(team) == self.group.size():
                return self.group
            if team not in self._made:
                self._made[team] = self._new(team)
            if is_mine:
                found = self._made[team]
        return found

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Closes this rank's connections in all of them when something fails inside.

        So those learn it who wait for this rank in another group than the one that failed.
        """
        try:
            yield
        except BaseException:
            for group in self._made.values():
                if group is not None:
                    hang_up(group)
            raise

    def close(self) -> None:
        """Ends them; nothing may be under way in any."""
        made = [group for group in self._made.values() if group is not None]
        self._made.clear()
        if self._make is None:
            for group in made:
                destroy_group(group)

    def _new(self, team: tuple[int, ...]) -> dist.ProcessGroup | None:
        try:
            if self._make is not None:
                return self._make(team)
            return _new_group(self.group, team, self._device)
        except RuntimeError as error:
            ranks = ", ".join(map(str, team))
            raise RankFailure(
                f"Rank {self.group.rank()} could not make the group of ranks {ranks} that a "
                "collective needs: one of them died, froze, or is still starting. Look at the "
                f"other ranks' logs. ({str(error).splitlines()[0][:200]})"
            ) from error


def _new_group(
    parent: dist.ProcessGroup, team: Sequence[int], device: torch.device
) -> dist.ProcessGroup | None:
    """torch.distributed's group over the team, with the parent's backend and time limit."""
    everyone = list(range(dist.get_world_size())) if dist.is_initialized() else []
    if parent.size() != len(everyone) or dist.get_process_group_ranks(parent) != everyone:
        raise PlanError(
            "Hierarchical and torus make groups of their own, which all ranks of the job enter "
            f"together; this group has {parent.size()} ranks and the job {len(everyone)}. Plan "
            "with native or direct, or average over all ranks."
        )
    made = dist.new_group(
        team, timeout=limit_of(parent, device), backend=backend_of(parent, device)
    )
    return made if isinstance(made, dist.ProcessGroup) else None


def limit_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long an operation of a group may take."""
    limit: timedelta = group._get_backend(device).options._timeout
    return limit
