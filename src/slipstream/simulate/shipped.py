"""The traces that come with Slipstream, and finding a trace by name or path."""

from __future__ import annotations

from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path

from slipstream.errors import TraceError
from slipstream.trace import Trace


def shipped_traces() -> tuple[str, ...]:
    """The names of the shipped traces, sorted; `generate_traces.py` in benchmarks makes them."""
    entries = files("slipstream").joinpath("traces").iterdir()
    return tuple(sorted(e.name.removesuffix(".json") for e in entries if e.name.endswith(".json")))


def load_trace(name_or_path: str) -> Trace:
    """A shipped trace by its name ("resnet50"), or a trace file by its path.

    What has a suffix or a folder in it is a path. Raises TraceError for an unknown name, and for a
    file that is missing or damaged.
    """
    path = Path(name_or_path)
    if path.suffix or path.name != name_or_path:
        return Trace.load(path)
    names = shipped_traces()
    if name_or_path not in names:
        near = get_close_matches(name_or_path, names, n=1)
        hint = f"did you mean {near[0]!r}? There" if near else "there"
        raise TraceError(
            f"There is no shipped trace {name_or_path!r}; {hint} are {', '.join(names)}; a "
            f"file is named with its folder or suffix, such as ./{name_or_path or 'trace'}.json."
        )
    resource = files("slipstream").joinpath("traces", f"{name_or_path}.json")
    return Trace.from_json(resource.read_text(encoding="utf-8"), f"shipped trace {name_or_path}")
