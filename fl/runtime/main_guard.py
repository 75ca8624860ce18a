"""Scripts that start this package and lack a guard: every worker process would begin the whole work anew.

A spawned process imports the script that its parent was started by. Where that calls the package outside of
`if __name__ == "__main__":`, the child leaves with a code of its own, by which the parent knows what to say.
"""

from __future__ import annotations

import sys

EXIT_CODE = 78
"""Exit code of such a process: EX_CONFIG of sysexits.h."""
CHILD_MAIN = "__mp_main__"
"""What multiprocessing calls the parent's script in a child."""
MESSAGE = (
    "the script that was started has no guard, so its worker processes begin it anew; put what it does under "
    '`if __name__ == "__main__":`, or use --workers 1'
)


class UnguardedError(ValueError):
    """A script without a guard was to be run in several processes."""

    def __init__(self) -> None:
        super().__init__(MESSAGE)


def leave_if_unguarded() -> None:
    """End a child that is still importing its parent's script, which has led it here."""
    if (
        sys.modules.get(CHILD_MAIN, sys.modules["__main__"]) is not sys.modules["__main__"]
    ):  # it is, once it is imported
        sys.exit(EXIT_CODE)
