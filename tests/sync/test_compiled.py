"""torch.compile, of the whole model and per block, before and after wrapping (case 11)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch.utils.checkpoint import checkpoint

from slipstream.sync import GradientSync
from small_models import Gradients, assert_matches, batch, gradients, loss_of, reseeded

pytestmark = [  # the compiler's own, about its own code
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


class Block(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 4)
        self.recompute = recompute

    def body(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(x).tanh())
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute:
            again: torch.Tensor = checkpoint(
                self.body, x, use_reentrant=False, preserve_rng_state=False
            )
            return x + again
        return x + self.body(x)


def blocks(recompute: bool = False) -> nn.Sequential:
    return reseeded(nn.Sequential(*(Block(recompute) for _ in range(4))).double(), 0)


def train(model: nn.Module, run: Any) -> list[Gradients]:
    seen = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(run, batch(0, step)).backward()
        optimizer.step()
        seen.append(gradients(model))
    return seen


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize(("cap_bytes", "wrap"), [(1024, "before"), (25 * 2**20, "after")])
@pytest.mark.parametrize("scope", ["whole", "per block"])
@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_equals_eager(cap_bytes: int, scope: str, wrap: str, recompute: bool) -> None:
    model = blocks(recompute)
    options = {"first_bytes": cap_bytes, "cap_bytes": cap_bytes}
    sync = GradientSync(model, plan="ddp", plan_options=options) if wrap == "before" else None
    if scope == "whole":
        run: Any = torch.compile(model, backend="aot_eager")
    else:
        for block in model:
            block.compile(backend="aot_eager")
        run = model
    sync = sync or GradientSync(model, plan="ddp", plan_options=options)
    mine = train(model, run)
    num_buckets = len(sync.plan.reduce)
    sync.close()
    plain = blocks(recompute)
    for seen, expected in zip(mine, train(plain, plain), strict=True):
        assert_matches(seen, expected, rtol=1e-11)
    assert num_buckets == (1 if cap_bytes > 2**20 else len(sync.timeline.buckets)) > 0
    assert cap_bytes > 2**20 or num_buckets > 3, "the limit holds under compilation too"


# else it compiles a program for each set it knows
@inductor_config.patch("cpp.vec_isa_ok", False)  # type: ignore[untyped-decorator]
def test_generated_code_equals_eager() -> None:
    model, plain = blocks()[:1], blocks()[:1]  # C++ takes long to compile
    sync = GradientSync(model)
    mine = train(model, torch.compile(model))
    sync.close()
    for seen, expected in zip(mine, train(plain, plain), strict=True):
        assert_matches(seen, expected, rtol=1e-10)


def test_per_block_compilation_keeps_gradients_coming_one_by_one() -> None:
    """Compiled whole, all gradients come at the end; per block the last block's come first."""
    model = blocks()
    for block in model:
        block.compile(backend="aot_eager")
    sync = GradientSync(model, plan="wfbp")
    train(model, model)
    order = [name for bucket in sync.plan.reduce for name in bucket.gradients]
    sync.close()
    assert [name[0] for name in order] == [block for block in "3210" for _ in range(4)]
