"""What a run ran on, learnt without importing torch."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from slipstream import __version__

_PACKAGES = ("torch", "torchvision", "numpy", "pydantic", "safetensors")
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "MKL_NUM_THREADS",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "PYTHONHASHSEED",
)


def environment() -> dict[str, Any]:
    """Python, system, processor, memory, graphics cards, package versions, variables that matter.

    All values are JSON. What cannot be learnt is None; nothing names the user or the machine.
    """
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": _gpu_models(),
        "packages": {"slipstream": __version__} | {name: _version(name) for name in _PACKAGES},
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model(source: Path = Path("/proc/cpuinfo")) -> str | None:
    return _field(source, "model name") or platform.processor() or None


def _gpu_models(root: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    models = (_field(path, "Model") for path in sorted(root.glob("*/information")))
    return [model for model in models if model]


def _field(path: Path, name: str) -> str | None:
    """The first value of `name` in a file of lines `name : value`; None without one."""
    if not path.is_file():
        return None
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        key, separator, value = line.partition(":")
        if separator and key.strip() == name:
            return value.strip()
    return None
