"""Selection on the GPU gives what the CPU gives: interpreted, and on a card if there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import triton_cases
from slipstream.errors import PlanError
from slipstream.sparsify import selector
from slipstream.sparsify.exact_gpu import ExactOnGPU, Tiling
from triton_cases import CASES

pytest.importorskip("triton")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str | None]:
    """What is wrong in each case, when all run in Triton's interpreter in one process."""
    command = [sys.executable, str(Path(triton_cases.__file__))]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    found: dict[str, str | None] = json.loads(run.stdout)
    return found


@pytest.mark.parametrize("case", CASES)
def test_interpreted_kernels_select_what_the_cpu_selects(
    interpreted: dict[str, str | None], case: str
) -> None:
    assert interpreted[case] is None


def test_it_is_what_a_selector_by_name_is_on_a_gpu() -> None:
    assert isinstance(selector("exact", device_type="cuda"), ExactOnGPU)
    for name, device_type in (("mstopk", "cuda"), ("exact", "xpu")):
        with pytest.raises(PlanError, match=f"no selector '{name}' on {device_type}"):
            selector(name, device_type=device_type)


def test_selection_is_imported_without_triton(interpreted: dict[str, str | None]) -> None:
    assert interpreted["imports"] is None


@pytest.mark.parametrize("name", triton_cases.KERNEL_NAMES)
def test_kernels_compile_and_keep_denormals_and_order(name: str) -> None:
    """The interpreter takes what the compiler refuses, so each is compiled, for sm_90."""
    ptx = triton_cases.ptx_of(name, 90)
    assert ".ftz" not in ptx, "denormals would be flushed to zero"
    assert "atom.global" not in ptx and "red.global" not in ptx


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", CASES)
def test_compiled_kernels_select_what_the_cpu_selects(case: str) -> None:
    assert CASES[case]("cuda") is None


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("n", [1_000_003, 6_000_000])
def test_compiled_kernels_with_the_tiling_that_is_used(n: int) -> None:
    tiling = Tiling()
    assert triton_cases.all_kinds("cuda", tiling, n, n // 100) is None
    assert triton_cases.fused_steps("cuda", tiling, n, n // 1000) is None


@pytest.mark.gpu
@needs_gpu
def test_the_host_never_waits_and_the_launches_can_be_captured() -> None:
    exact, n, k = ExactOnGPU(), 100_000, 1000
    gradient, old, new = (torch.zeros(n, device="cuda") for _ in range(3))
    exact.select_sum(gradient, old, new, k)  # compiles
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        exact.select_sum(gradient, old, new, k)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        selection = exact.select_sum(gradient, old, new, k)
    for seed in (1, 2):
        values = triton_cases.normal(n, seed)
        gradient.copy_(values)
        graph.replay()
        assert triton_cases.wrong_selection(selection, values, k) is None
