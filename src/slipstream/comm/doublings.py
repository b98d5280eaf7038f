"""All-reduces in a number of rounds that grows with the logarithm of the team: for small tensors.

Ranks beyond the largest power of two hand their values to a partner before, and get the result from
it afterwards.

    recursive doubling   everybody exchanges all it has with a partner at distance 1, 2, 4, ...
    halving-doubling     (Rabenseifner) halves of halves are exchanged and added, then put together
                         again: twice the rounds, and the bytes of a ring
"""

from __future__ import annotations

import torch

from slipstream.comm.formats import Format
from slipstream.comm.teams import Steps, Team

_LAST_TAG = 63


def recursive_doubling(
    team: Team, flat: torch.Tensor, form: Format, tag: int, divisor: int
) -> Steps:
    """Replaces `flat` by the sum over the team, divided by `divisor`. Tags: 64 from `tag` on."""
    core = 1 << (team.size.bit_length() - 1)
    yield from _fold(team, flat, form, tag, core)
    if team.index < core:
        distance = 1
        while distance < core:
            partner = team.index ^ distance
            arriving = form.buffer(flat)
            awaited = team.receive(arriving, partner, tag + distance.bit_length())
            # both partners add the same two rounded values, so they have the same bits
            sent = team.send(form.rounded(flat), partner, tag + distance.bit_length())
            yield [awaited, sent]
            form.add(flat, arriving)
            distance *= 2
        if divisor != 1:
            flat.div_(divisor)
        form.rounded(flat)
    yield from _unfold(team, flat, form, tag + _LAST_TAG, core)


def halving_doubling(team: Team, flat: torch.Tensor, form: Format, tag: int, divisor: int) -> Steps:
    """Replaces `flat` by the sum over the team, divided by `divisor`. Tags: 64 from `tag` on."""
    last_tag = tag + _LAST_TAG
    core = 1 << (team.size.bit_length() - 1)
    yield from _fold(team, flat, form, tag, core)
    if team.index < core:
        kept, exchanged = flat, list[tuple[int, torch.Tensor, torch.Tensor]]()
        distance = core // 2
        while distance:
            tag += 1
            partner = team.index ^ distance
            low, high = kept.tensor_split(2)
            mine, theirs = (high, low) if team.index & distance else (low, high)
            arriving = form.buffer(mine)
            awaited = team.receive(arriving, partner, tag)
            sent = team.send(form.packed(theirs), partner, tag)
            yield [awaited, sent]
            form.add(mine, arriving)
            exchanged.append((partner, mine, theirs))
            kept, distance = mine, distance // 2
        if divisor != 1:
            kept.div_(divisor)
        form.rounded(kept)
        for partner, mine, theirs in reversed(exchanged):
            tag += 1
            arriving = form.place(theirs)
            awaited = team.receive(arriving, partner, tag)
            sent = team.send(form.packed(mine), partner, tag)
            yield [awaited, sent]
            form.put(arriving, theirs)
    yield from _unfold(team, flat, form, last_tag, core)


def _fold(team: Team, flat: torch.Tensor, form: Format, tag: int, core: int) -> Steps:
    """Those behind the core hand over what they have; the others add it."""
    if team.index >= core:
        yield [team.send(form.packed(flat), team.index - core, tag)]
    elif team.index + core < team.size:
        arriving = form.buffer(flat)
        yield [team.receive(arriving, team.index + core, tag)]
        form.add(flat, arriving)


def _unfold(team: Team, flat: torch.Tensor, form: Format, tag: int, core: int) -> Steps:
    """They get the result."""
    if team.index >= core:
        arriving = form.place(flat)
        yield [team.receive(arriving, team.index - core, tag)]
        form.put(arriving, flat)
    elif team.index + core < team.size:
        yield [team.send(form.packed(flat), team.index + core, tag)]
