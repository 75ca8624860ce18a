"""Write the committed list of `hyperleak reproduce --list` anew, after a change of configs, cells or estimates.

    python -m benchmarks.reproduce_list

It takes half a minute. Where weights of networks are missing, their tables have no cost: give it the data folder.
"""

from __future__ import annotations

from eval.reproduce.index import write_index
from eval.reproduce.items import list_items
from eval.reproduce.listing import list_status


def main() -> None:
    """Compute the status of all tables and figures, and write it."""
    write_index(list_status(list_items()))


if __name__ == "__main__":
    main()
