"""Numbers as words of a sentence."""

from __future__ import annotations

from datetime import datetime, timezone


def percent(share: float, digits: int = 0) -> str:
    """Returns a share as a percentage.

    Example:
        >>> percent(0.125), percent(0.125, 1)
        ('12 %', '12.5 %')
    """
    return f"{100 * share:.{digits}f} %"


def rate(value: float) -> str:
    """Returns a number with at least three significant digits.

    Example:
        >>> rate(12345.6), rate(12.34), rate(0.04321)
        ('12,346', '12.3', '0.0432')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def times(ratio: float) -> str:
    """Returns a speed-up, with as many digits as tell it from 1.

    Example:
        >>> times(1.04), times(2.345)
        ('1.04', '2.3')
    """
    return f"{ratio:.1f}" if ratio >= 1.1 else f"{ratio:.2f}"


def duration(seconds: float) -> str:
    """Returns a time in a unit that suits it.

    Example:
        >>> duration(0.0123), duration(42), duration(600)
        ('12.3 ms', '42 s', '10 min')
    """
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


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
