"""How figures and lists are put into words."""

from __future__ import annotations

from eval.metrics.statistics import Interval

NO_VALUE = "\N{EN DASH}"
"""Stands where there is no figure."""
FURTHER_ACCURACIES = {
    "tuned": "after fine-tuning",
    "unseen": "on clients that never took part",
    "unseen_tuned": "on those, after fine-tuning",
    "global": "on one test for all",
}
"""The further scores of a federation (`fl.simulation.protocol`), in words."""
ACCURACY_NAMES = {
    "accuracy": "after the last round",
    "accuracy_local": "after local training",
    **{f"accuracy_{name}": words for name, words in FURTHER_ACCURACIES.items()},
}
"""Every accuracy there may be, in words."""
_SUPERSCRIPTS = str.maketrans("-0123456789", "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079")
"""To superscripts."""


def format_number(value: float | None, digits: int = 1, *, sign: bool = False) -> str:
    """Return a figure with a true minus sign, or a dash where there is none.

    Args:
        value: the figure.
        digits: behind the point.
        sign: whether a plus sign is written, too.
    """
    if value is None:
        return NO_VALUE
    return f"{value:{'+' if sign else ''}.{digits}f}".replace("-", "\N{MINUS SIGN}")


def format_interval(found: Interval | None, digits: int = 1, *, sign: bool = False) -> str:
    """Return an interval as `19.1 [17.9, 20.0]`; without brackets where there is none.

    Args:
        found: the interval.
        digits: behind the point.
        sign: whether plus signs are written, too.
    """
    if found is None:
        return NO_VALUE
    value = format_number(found.value, digits, sign=sign)
    if found.low is None or found.high is None:
        return value
    low, high = (format_number(end, digits, sign=sign) for end in (found.low, found.high))
    return f"{value} [{low}, {high}]"


def format_percent(value: float | None, digits: int = 0) -> str:
    """Return a share as `85 %`."""
    return NO_VALUE if value is None else f"{value * 100:.{digits}f}\N{NO-BREAK SPACE}%"


def format_percent_interval(found: Interval | None, digits: int = 0) -> str:
    """Return an interval as `25 % [7, 59]`; without brackets where there is none."""
    if found is None:
        return NO_VALUE
    value = format_percent(found.value, digits)
    if found.low is None or found.high is None:
        return value
    return f"{value} [{found.low * 100:.{digits}f}, {found.high * 100:.{digits}f}]"


def format_error(value: float | None) -> str:
    """Return a relative error: `0.36`, or `7 x 10^-7` with proper signs; a dash where there is none."""
    if value is None:
        return NO_VALUE
    if value == 0 or 1e-3 <= value < 1e4:
        return f"{value:.2g}" if value < 10 else f"{value:.0f}"
    digits, _, power = f"{value:.0e}".partition("e")
    exponent = str(int(power)).translate(_SUPERSCRIPTS)
    return f"{digits}\N{NO-BREAK SPACE}\N{MULTIPLICATION SIGN}\N{NO-BREAK SPACE}10{exponent}"


def lpips_name(column: str) -> str:
    """Return LPIPS with its backbone, from its column: `LPIPS squeeze@64`."""
    return column.replace("lpips_", "LPIPS ")
