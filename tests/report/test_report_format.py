"""Numbers in words."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.report.markup import Markup, el, text
from slipstream.words import count, duration, percent, plain, size, tidy


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0 s"),
        (850e-6, "850 µs"),
        (0.0123, "12.3 ms"),
        (0.99949, "999 ms"),
        (0.9996, "1.00 s"),
        (4.2, "4.20 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (185.2, "3 min 5 s"),
        (3599.7, "1 h 0 min 0 s"),
        (7385, "2 h 3 min 5 s"),
        (-2.0, "-2.00 s"),
        (None, "-"),
        (math.nan, "-"),
        (10**400, "-"),
    ],
)
def test_durations(seconds: float | None, expected: str) -> None:
    assert duration(seconds) == expected


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (25 * 2**20, "25.0 MiB"),
        (1023.9 * 2**10, "1.00 MiB"),
        (3 * 2**50, "3072 TiB"),
        (None, "-"),
    ],
)
def test_sizes(num_bytes: float | None, expected: str) -> None:
    assert size(num_bytes) == expected


def test_other_numbers() -> None:
    assert count(1034.4) == "1,034"
    assert count(math.inf) == "-"
    assert percent(0.92431) == "92.4 %"
    assert percent(0.92431, 2) == "92.43 %"
    assert plain(0.27543) == "0.2754"
    assert plain(1234567.0) == "1.23e+06"
    assert plain(-0.0) == "-0"
    assert [tidy(s) for s in ("50.0 ms", "2.50 ms", "1.00 s", "100 %", "0.05")] == [
        "50 ms",
        "2.50 ms",
        "1 s",
        "100 %",
        "0.05",
    ]


@given(st.floats() | st.integers())
def test_any_number_has_words(value: float) -> None:
    for words in (count, duration, percent, size):
        assert words(value)


def test_markup_escapes_once() -> None:
    inner = el("b", "1 < 2 & 3", class_="x", stroke_width=1.5, title='"')
    assert inner == '<b class="x" stroke-width="1.5" title="&quot;">1 &lt; 2 &amp; 3</b>'
    assert el("p", [inner, None, Markup("<br/>")]) == f"<p>{inner}<br/></p>"
    assert text("a\x00\ud800\x1b") == "a\ufffd\ufffd\ufffd"
