"""An audit as an assertion, for tests: it fails where an update gives images away, and where that stays open."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from eval.audit.findings import AuditReport
from eval.audit.judgment import Judgment, update_words
from eval.audit.python_words import in_python
from fl.types import Batch
from fl.view import ServerView
from hyperleak.api import audit

UNDECIDED = ("fail", "pass")
MOST_LINES = 20
"""Leaks, failures and open questions that a message lists."""


def assert_no_leak(
    subject: nn.Module | ServerView,
    images: Tensor | Batch | None = None,
    labels: Tensor | Sequence[int] | None = None,
    *,
    max_psnr: float | None = None,
    max_ssim: float | None = None,
    undecided: str = "fail",
    **settings: Any,
) -> AuditReport:
    """Audit updates as `hyperleak.audit` does, and raise an error if they give more away than is allowed.

    Without limits every leak counts: images, private tensors, and images that an attack confirms where nobody knows
    the true ones. With limits only an image above one of them does. An attack that ends with an error is a failure.

    Args:
        subject: the model as it was when the update was made, or a view (`fl.capture`).
        images: (N, C, H, W) in [0, 1] as floats, or a batch; those behind the update.
        labels: int64 (N,) or a list of integers, beside images that are a tensor.
        max_psnr: how close an image may come, in dB.
        max_ssim: how similar an image may be, from -1 to 1.
        undecided: "fail" if an audit that is not decided is a failure, "pass" if it is none.
        **settings: whatever else `hyperleak.audit` takes: `update=`, `truth=`, `minutes=`, `attacks=`, `out=`.

    Returns:
        The audit's report, where nothing failed.

    Raises:
        AssertionError: something leaked, or an attack failed, or the audit is not decided; says what, by which attack,
            with figures beside those of the best guess without the update.
        ValueError, TypeError: what is asked for can't be, or as `hyperleak.audit`.
    """
    __tracebackhide__ = True
    limits = _limits({"max_psnr": max_psnr, "max_ssim": max_ssim})
    if undecided not in UNDECIDED:
        raise ValueError(f"undecided: expected 'fail' or 'pass', got {undecided!r}")
    if limits and images is None and settings.get("truth") is None:
        given = " and ".join(f"max_{figure}" for figure in limits)
        raise ValueError(f"expected images and labels beside {given}: nothing can be scored without the true images")
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # those of other packages: a suite that makes errors of warnings means its own
        report = audit(subject, images, labels, **settings)
    judgment = Judgment(report, limits)
    if report.stopped:
        raise KeyboardInterrupt(f"stopped at {report.stopped}")
    if judgment.violations or judgment.failed or (judgment.undecided and undecided == "fail"):
        raise AssertionError(_failure(judgment, told=undecided == "fail"))
    return report


def _limits(given: dict[str, float | None]) -> dict[str, float]:
    """Return the limits that are set, by figure; a ValueError says which can't be one."""
    found = {}
    for name, limit in given.items():
        if limit is None:
            continue
        number = isinstance(limit, int | float) and not isinstance(limit, bool)
        if not number or not math.isfinite(limit) or (name == "max_ssim" and not -1 <= limit <= 1):
            wanted = "a number in [-1, 1]" if name == "max_ssim" else "a finite number"
            raise ValueError(f"{name}: expected {wanted}, got {limit!r}")
        found[name.removeprefix("max_")] = float(limit)
    return found


def _failure(judgment: Judgment, *, told: bool) -> str:
    """Return what failed, a line each.

    Args:
        judgment: what the audit came to.
        told: whether open questions are among it.
    """
    leaked = [f"leaked: {leak.attack} on {update_words(leak.update)}: {leak.words}" for leak in judgment.violations]
    failed = [
        f"failed: {found.attack}: {found.failed}{f' ({found.origin})' if found.origin else ''}"
        for found in judgment.failed
    ]
    asked = [f"not decided: {in_python(str(one))}" for one in judgment.undecided] if told else []
    lines = [*leaked, *failed, *asked]
    head = "something leaked" if leaked else "an attack failed" if failed else "not decided"
    if len(lines) > MOST_LINES:
        lines = [*lines[:MOST_LINES], f"and {len(lines) - MOST_LINES} more"]
    if asked and not leaked and not failed:
        lines.append('undecided="pass" lets through what is not decided')
    return "\n  ".join([f"{judgment.report.subject}: {head}", *lines])
