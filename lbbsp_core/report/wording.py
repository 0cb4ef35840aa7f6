"""Words of figures: how numbers are written for people, everywhere in pages and in the terminal."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Final

SAME: Final = 0.03
"""Speed-ups this close to 1 count as none."""


def percent(share: float, digits: int = 0) -> str:
    """Returns a share as a percentage.

    Example:
        >>> percent(0.125), percent(0.125, 1)
        ('12 %', '12.5 %')
    """
    return f"{100 * share:,.{digits}f} %"


def grouped(value: float, digits: int = 3) -> str:
    """Returns a number with at least so many significant digits, and all before the point.

    Example:
        >>> grouped(12345.6), grouped(999.7), grouped(12.34), grouped(0.04321), grouped(-0.5)
        ('12,346', '1,000', '12.3', '0.0432', '-0.5')
    """
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def rate(samples_per_second: float) -> str:
    """Returns a throughput.

    Example:
        >>> rate(1311.4)
        '1,311 samples/s'
    """
    return f"{grouped(samples_per_second)} samples/s"


def between(low: float, high: float) -> str:
    """Returns a range of speed-ups, each with as many digits as tell it from 1.

    Example:
        >>> between(1.04, 1.04), between(1.68, 2.19), between(2.31, 2.34)
        ('1.04', '1.7 to 2.2', '2.3')
    """
    ends = [f"{ratio:,.1f}" if ratio >= 1.1 else f"{ratio:.2f}" for ratio in (low, high)]
    return " to ".join(dict.fromkeys(ends))


def times(low: float, high: float | None = None) -> str:
    """Returns how many times something is, or a range.

    Example:
        >>> times(2.345), times(1.68, 2.19)
        ('2.3 times', '1.7 to 2.2 times')
    """
    return f"{between(low, low if high is None else high)} times"


def compared(other: str, low: float, high: float | None = None) -> str:
    """Returns how fast something is beside another thing; 3 % count as nothing.

    Example:
        >>> compared("plain BSP", 1.5), compared("plain BSP", 1.0, 1.01)
        ('1.5 times as fast as plain BSP', 'about as fast as plain BSP')
        >>> compared("plain BSP", 0.8)
        'slower than plain BSP (0.80 times as fast)'
        >>> compared("plain BSP", 0.95, 1.2)
        '0.95 to 1.2 times as fast as plain BSP'
    """
    high = low if high is None else high
    if low >= 1 - SAME and high <= 1 + SAME:
        return f"about as fast as {other}"
    if high < 1:
        return f"slower than {other} ({times(low, high)} as fast)"
    return f"{times(low, high)} as fast as {other}"


def duration(seconds: float) -> str:
    """Returns a time in a unit that suits it.

    Example:
        >>> duration(0.0123), duration(0.9999), duration(42), duration(75), duration(7500)
        ('12.3 ms', '1,000 ms', '42 s', '1 min 15 s', '2 h 5 min')
    """
    if seconds < 1:
        return f"{grouped(1e3 * seconds)} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, remainder = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {remainder} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def moment(seconds: float) -> str:
    """Returns a time in seconds since 1970 as a date.

    Example:
        >>> moment(1.7e9), moment(1e300)
        ('2023-11-14 22:13:20 UTC', '1e+300 s since 1970')
    """
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):  # a clock that is far off
        return f"{seconds:g} s since 1970"
