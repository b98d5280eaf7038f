"""What selection on the GPU must give, as cases for any device; a script runs them all interpreted.

`TRITON_INTERPRET=1 python triton_cases.py` prints {case: what is wrong, or null} as JSON: the
interpreter has to be asked for before Triton is imported, so it needs a process of its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from slipstream.sparsify import ErrorFeedback, Selection, selector
from slipstream.sparsify.exact_gpu import ExactOnGPU, Tiling

INF, NAN = float("inf"), float("nan")
KERNELS = "slipstream.sparsify.triton_kernels"
SMALL = Tiling(tile=64, most_programs=4, rows=4, columns=1024, spare=0)
"""Many tiles for a program, several programs, and room for few candidates: all loops are run."""
WIDE = Tiling(rows=4, columns=1024)
"""One tile holds all; columns are wide because the interpreter is slow for each program."""


SIZES = {
    "ADD": True,
    "TAKE_OUT": True,
    "TILE": 4096,
    "PROGRAMS": 1024,
    "BINS": 1024,
    "ROWS": 256,
    "COLUMNS": 32,
    "SHIFT": 10,
}
"""The sizes that are used, for `ptx_of`."""
KERNEL_NAMES = (
    *("count_first", "count_next", "sum_counts", "choose_digit", "tally"),
    *("collect_candidates", "collect_selected", "restore"),
)


def normal(n: int, seed: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def kinds(n: int) -> dict[str, torch.Tensor]:
    """[n] numbers, each kind with its own difficulty."""
    some = normal(n, 1)
    odd = some.clone()
    odd[::7] = torch.tensor([NAN, INF, -INF]).repeat(n)[: odd[::7].numel()]
    few = torch.zeros(n)
    few[:: max(1, n // 5)] = some[:: max(1, n // 5)]
    signed_zeros = torch.zeros(n)
    signed_zeros[::2] = -0.0
    return {
        "cubed": some**3,
        "equal": torch.full((n,), -2.5),
        "zeros": signed_zeros,
        "denormals": some * 1e-42,
        "ties": some.round(),
        "few": few,
        "not finite": odd,
        "near": 1.0 + (some.abs() * 1000).round() * 2**-23,  # differ in the last digit alone
        "payloads": (some.view(torch.int32) | 0x7F800001).view(torch.float32),
    }


def bits_of(values: torch.Tensor) -> list[int]:
    return values.view(torch.int32).tolist()


def wrong_selection(selection: Selection, values: torch.Tensor, k: int) -> str | None:
    """What differs from both of the CPU's exact selectors; values are on the CPU."""
    for name in ("reference", "exact"):
        expected = selector(name).select(values, k)
        if selection.indices.dtype != torch.int32 or selection.values.dtype != torch.float32:
            return "dtypes"
        if selection.indices.tolist() != expected.indices.tolist():
            return f"indices: {selection.indices.tolist()[:9]}, {name} has {expected.indices[:9]}"
        if bits_of(selection.values.cpu()) != bits_of(expected.values):
            return "values"
    return None


def short_lengths(device: str, tiling: Tiling) -> str | None:
    """Lengths 1..33 of cubed normal numbers, with k = 1, n and in between."""
    exact = ExactOnGPU(tiling)
    for n in range(1, 34):
        values = normal(n, n) ** 3
        for k in {(1, n // 2 + 1, n - 1 or 1)[n % 3], n}:
            wrong = wrong_selection(exact.select(values.to(device), k), values, k)
            if wrong:
                return f"{k} of {n}: {wrong}"
    return None


def all_kinds(device: str, tiling: Tiling, n: int, k: int) -> str | None:
    """k of n numbers of every kind, which are left as they are."""
    exact = ExactOnGPU(tiling)
    for kind, values in kinds(n).items():
        given = values.to(device)
        wrong = wrong_selection(exact.select(given, k), values, k)
        if wrong or bits_of(given.cpu()) != bits_of(values):
            return f"{kind}: {wrong or 'the values were changed'}"
    return None


def same_but_for_payloads(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Bit for bit; any NaN is like any other, as processors differ in what they make of one."""
    finite = first.isfinite()
    if not torch.equal(finite, second.isfinite()):
        return False
    odd = torch.equal(first[~finite].nan_to_num(7.0), second[~finite].nan_to_num(7.0))
    return odd and bits_of(first[finite]) == bits_of(second[finite])


def fused_steps(device: str, tiling: Tiling, n: int, k: int) -> str | None:
    """Steps of `select_sum` beside those of the CPU's ErrorFeedback; some sums are not finite."""
    feedback, exact = ErrorFeedback(n, selector("exact")), ExactOnGPU(tiling)
    old, new = torch.zeros(n, device=device), torch.full((n,), NAN, device=device)
    for step, kind in enumerate(["cubed", "zeros", "not finite", "ties", "huge", "huge", "near"]):
        huge = normal(n, 5).sign() * 2e38  # the second time some sums overflow
        gradient = huge if kind == "huge" else kinds(n)[kind]
        before = old.clone()
        selection = exact.select_sum(gradient.to(device), old, new, k)
        expected = feedback.select(gradient, k)
        where = f"step {step} ({kind})"
        if selection.indices.tolist() != expected.indices.tolist():
            return f"{where}: indices"
        if not same_but_for_payloads(selection.values.cpu(), expected.values):
            return f"{where}: values"
        if bits_of(new.cpu()) != bits_of(feedback.residual):
            return f"{where}: residual"
        if bits_of(old.cpu()) != bits_of(before.cpu()):
            return f"{where}: the old residual was changed"
        assert exact.num_nonfinite is not None
        if int(exact.num_nonfinite) != feedback.num_nonfinite:
            return f"{where}: {int(exact.num_nonfinite)} not finite"
        old, new = new, old
    return None


def refusals(device: str, tiling: Tiling) -> str | None:
    """What is refused, with words of the message; nothing selected from nothing."""
    exact, three = ExactOnGPU(tiling), torch.ones(3, device=device)
    four = torch.ones(4, device=device)
    refused: list[tuple[str, Callable[[], Selection]]] = [
        ("0 of 3", lambda: exact.select(three, 0)),
        ("4 of 3", lambda: exact.select(three, 4)),
        ("float64", lambda: exact.select(three.double(), 1)),
        ("meta", lambda: exact.select(torch.ones(3, device="meta"), 1)),
        ("(2, 2)", lambda: exact.select(four.view(2, 2), 1)),
        ("contiguous", lambda: exact.select(four[::2], 1)),
        ("4 on", lambda: exact.select_sum(three, four, four.clone(), 1)),
        ("memory of its own", lambda: exact.select_sum(three, four[:3], four[1:], 1)),
        ("memory of its own", lambda: exact.select_sum(three, three.clone(), three, 1)),
    ]
    for words, call in refused:
        try:
            call()
        except ValueError as error:
            if words not in str(error):
                return f"{words!r} is not in {error}"
        else:
            return f"{words!r} was not refused"
    none = torch.empty(0, device=device)
    for empty in (exact.select(none, 0), exact.select_sum(none, none, none, 0)):
        if empty.indices.numel() or empty.values.numel():
            return "something was selected from nothing"
    return None


def ptx_of(name: str, capability: int) -> str:
    """The assembly of a kernel for a GPU that need not be there; no assembler is run."""
    from triton._C.libtriton import ir  # type: ignore[import-untyped]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
    from triton.compiler import ASTSource, make_backend  # type: ignore[import-untyped]

    from slipstream.sparsify import triton_kernels

    kernel = getattr(triton_kernels, name)
    signature: dict[str, str] = {}
    constants: dict[tuple[int], int] = {}
    attributes: dict[tuple[int], list[list[str | int]]] = {}
    floats = ("gradient", "old", "new") if name == "count_first" else ()
    for place, argument in enumerate(kernel.arg_names):
        if argument in SIZES:
            signature[argument], constants[(place,)] = "constexpr", SIZES[argument]
        elif argument in ("n", "k", "room", "programs"):
            signature[argument] = "i32"
        else:
            signature[argument] = "*fp32" if argument in floats else "*i32"
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", capability, 32)
    backend, context = make_backend(target), ir.context()
    stages: dict[str, Callable[[Any, Any], Any]] = {}
    options = backend.parse_options({"num_warps": 8, **source.parse_options()})
    ir.load_dialects(context)
    backend.load_dialects(context)
    backend.add_stages(stages, options, source.language)
    metadata = {"target": target, **options.__dict__}
    functions = backend.get_codegen_implementation(options)
    made = source.make_ir(target, options, functions, backend.get_module_map(), context)
    for stage in ("ttir", "ttgir", "llir", "ptx"):
        made = stages[stage](made, metadata)
    return str(made)


Case = Callable[[str], str | None]

CASES: dict[str, Case] = {
    "lengths 1 to 33": lambda device: short_lengths(device, WIDE),
    "1000 of every kind": lambda device: all_kinds(device, WIDE, 1000, 100),
    "500 with many tiles": lambda device: all_kinds(device, SMALL, 500, 45),
    "4097 and one": lambda device: all_kinds(device, WIDE, 4097, 1),
    "4097 and all but one": lambda device: all_kinds(device, WIDE, 4097, 4096),
    "fused, one tile": lambda device: fused_steps(device, WIDE, 300, 9),
    "fused, many tiles": lambda device: fused_steps(device, SMALL, 420, 12),
    "fused, all sent": lambda device: fused_steps(device, WIDE, 33, 33),
    "refusals": lambda device: refusals(device, WIDE),
}


if __name__ == "__main__":
    early = "Triton was imported with the classes" if KERNELS in sys.modules else None
    with np.errstate(all="ignore"):  # the interpreter adds with numpy, and sums overflow on purpose
        found = {"imports": early} | {name: case("cpu") for name, case in CASES.items()}
    json.dump(found, sys.stdout)
