"""The pytest plugin of hyperleak: the fixture `assert_no_leak`.

pytest imports this module at its start, wherever hyperleak is installed. So it stands beside the packages and imports
none of them, nor torch, before the fixture is used.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from eval.audit.findings import AuditReport


@pytest.fixture(scope="session")
def assert_no_leak() -> Callable[..., AuditReport]:
    """Return `hyperleak.assert_no_leak`, which fails a test if a model's or a captured update gives images away."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # what other packages warn of as they are imported is no error of the test's
        from hyperleak import no_leak, shadowed_package
    if problem := shadowed_package():
        raise ImportError(problem)
    return no_leak.assert_no_leak
