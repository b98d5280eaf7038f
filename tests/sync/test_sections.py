"""The memory of plans that gather: every gradient has its place in both halves, and only there."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from slipstream.plan import Bucket, Plan
from slipstream.sync.buffers import agreed_strides
from slipstream.sync.sections import Layout, lay_out

SHAPES: list[tuple[int, ...]] = [(), (1,), (3,), (0,), (2, 3), (17,), (5, 4), (64,)]


def bucket(params: dict[str, nn.Parameter], names: list[str]) -> Bucket:
    return Bucket(gradients=tuple(names), bytes=sum(params[name].nbytes for name in names))


def cut(params: dict[str, nn.Parameter], names: list[str], cuts: list[int]) -> tuple[Bucket, ...]:
    bounds = sorted({0, len(names), *(cut % len(names) for cut in cuts)})
    return tuple(bucket(params, names[start:end]) for start, end in pairwise(bounds))


def travel(layouts: list[Layout]) -> None:
    """What the network does to the buckets of all ranks, one rank at a time."""
    world_size = len(layouts)
    for buckets in zip(*(layout.reduce for layout in layouts), strict=True):
        for made in buckets:
            made.complete()
        total = sum(made.flat for made in buckets).view(world_size, -1)
        for rank, made in enumerate(buckets):
            made.row.copy_(total[rank])
    for gathers in zip(*(layout.gather for layout in layouts), strict=True):
        for gather in gathers:
            gather.fill()
        rows = [gather.row.clone() for gather in gathers]
        for gather in gathers:
            gather.flat.copy_(torch.cat(rows))
            gather.unpack()


@given(
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=9),
    world_size=st.integers(1, 5),
    reduce_cuts=st.lists(st.integers(0, 8), max_size=4),
    gather_cuts=st.lists(st.integers(0, 8), max_size=4),
    is_complex=st.booleans(),
)
def test_what_all_ranks_put_in_comes_back_as_its_sum(
    shapes: list[tuple[int, ...]],
    world_size: int,
    reduce_cuts: list[int],
    gather_cuts: list[int],
    is_complex: bool,
) -> None:
    dtype = torch.complex128 if is_complex else torch.float64
    params = {f"p{i}": nn.Parameter(torch.zeros(s, dtype=dtype)) for i, s in enumerate(shapes)}
    names = list(params)
    plan = Plan(
        planner="pipelined",
        nodes=world_size,
        ranks_per_node=1,
        wait="forward",
        reduce=cut(params, names[::-1], reduce_cuts),
        gather=cut(params, names, gather_cuts),
    )
    strides = {name: agreed_strides(param) for name, param in params.items()}
    layouts = [lay_out(plan, params, strides, rank, world_size) for rank in range(world_size)]
    generator = torch.Generator().manual_seed(0)
    sent = [
        {n: torch.randn(p.shape, dtype=dtype, generator=generator) for n, p in params.items()}
        for _ in layouts
    ]
    for layout, gradients in zip(layouts, sent, strict=True):
        for made in layout.reduce:
            made.flat.fill_(torch.nan)
        for name, gradient in gradients.items():
            layout.pieces[name].put(gradient, None)
    travel(layouts)
    for layout in layouts:
        for name in names:
            expected = sum(gradients[name] for gradients in sent)
            assert isinstance(expected, torch.Tensor)
            torch.testing.assert_close(layout.pieces[name].view, expected, rtol=1e-12, atol=1e-12)
        for made in layout.reduce:
            assert torch.equal(made.flags, torch.full_like(made.flags, float(world_size)))
            assert made.averages.isfinite().all(), "padding is zero"


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_plan_has_few_sections_and_most_gradients_lie_in_one_row(world_size: int) -> None:
    params = {f"p{i}": nn.Parameter(torch.zeros(10 + i % 7)) for i in range(200)}
    names = list(params)
    eighths = [names[start : start + 25] for start in range(0, 200, 25)]
    plan = Plan(
        planner="pipelined",
        nodes=world_size,
        ranks_per_node=1,
        wait="forward",
        reduce=tuple(bucket(params, part[::-1]) for part in eighths[::-1]),
        gather=tuple(bucket(params, part) for part in eighths),
    )
    strides = {name: agreed_strides(param) for name, param in params.items()}
    layout = lay_out(plan, params, strides, 0, world_size)
    assert sum(len(gather.parts) for gather in layout.gather) == 8
    assert not any(gather.copies for gather in layout.gather), "a single section is whole"
    split = [piece for piece in layout.pieces.values() if piece.target is None]
    assert len(split) <= 8 * (world_size - 1)
