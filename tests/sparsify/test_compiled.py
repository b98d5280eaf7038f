"""Kernels are compiled once, kept, and do without keeping where that cannot be."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import numpy as np
import pytest

from slipstream.sparsify import compiled
from slipstream.sparsify.warm import warm

SOURCE = """
import numpy as np
from slipstream.sparsify.compiled import compiled

@compiled("int64(int32[::1])")
def total(values):
    found = 0
    for i in range(len(values)):
        found += values[i]
    return found
"""
REPORT = "print(sum(kernels.total.stats.cache_misses.values()))"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module with one kernel, kept beside it."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    path = tmp_path / "kernels.py"
    path.write_text(SOURCE)
    return path


def loaded(path: Path) -> ModuleType:
    """The module, run anew."""
    spec = importlib.util.spec_from_file_location("kernels", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.total(np.arange(5, dtype=np.int32)) == 10
    return module


def misses(module: ModuleType) -> int:
    return sum(module.total.stats.cache_misses.values())


def test_a_kernel_is_kept_and_found_again(source: Path) -> None:
    assert misses(loaded(source)) == 1
    assert misses(loaded(source)) == 0
    with pytest.raises(TypeError, match="No matching definition"):
        loaded(source).total(np.arange(5, dtype=np.float64))


@pytest.mark.processes
def test_of_processes_that_start_together_one_compiles(source: Path) -> None:
    command = [sys.executable, "-c", f"import kernels; {REPORT}"]
    environment = os.environ | {"PYTHONPATH": str(source.parent)}
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert sorted(map(int, outputs)) == [0, 1]


def test_a_damaged_cache_is_named_and_done_without(source: Path) -> None:
    loaded(source)
    (index,) = (source.parent / "__pycache__").glob("*.nbi")
    index.write_bytes(index.read_bytes()[:40])
    with pytest.warns(RuntimeWarning, match=r"'total' cannot be kept .*NUMBA_CACHE_DIR"):
        loaded(source)


def test_where_nothing_can_be_kept_it_is_compiled_all_the_same(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    njit = numba.njit

    def refuse(*arguments: Any, cache: bool = False, **settings: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return njit(*arguments, **settings)

    monkeypatch.setattr(numba, "njit", refuse)
    with pytest.warns(RuntimeWarning, match="no locator available"):
        loaded(source)
    assert not list(source.parent.glob("__pycache__/*.nbi"))


@pytest.mark.processes
def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    holder = (
        "import time; from pathlib import Path\n"
        "from slipstream.sparsify.compiled import only_one_in\n"
        f"with only_one_in(Path({str(tmp_path)!r})):\n"
        "    print('held', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
        with open(tmp_path / compiled.LOCK_NAME) as other:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_lock_is_waited_for_no_longer_than_its_limit(tmp_path: Path) -> None:
    begin = time.monotonic()
    with compiled.only_one_in(tmp_path), compiled.only_one_in(tmp_path, wait_seconds=0.1):
        assert time.monotonic() - begin >= 0.1


def test_all_kernels_can_be_compiled_beforehand() -> None:
    assert warm() >= 0.0
    from slipstream.sparsify import kernels, threshold_kernels

    for module in (kernels, threshold_kernels):
        own = [item for item in vars(module).values() if hasattr(item, "nopython_signatures")]
        assert own and all(len(kernel.nopython_signatures) == 1 for kernel in own)
