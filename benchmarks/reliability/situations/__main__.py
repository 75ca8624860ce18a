"""Situations in which people are: `python -m benchmarks.reliability.situations`.

Each is given to `hyperleak.audit` or to the command, and ends attacked or refused. Results are written after each row,
and the same call goes on where it was stopped. It ends with 1 where a row ends in a traceback or is not right.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from benchmarks.common import known_rows, publish, results_parser, rewrite, start
from benchmarks.reliability.situations import altered, checkpoints, models, updates
from benchmarks.reliability.situations.page import MOST_REFUSED, document
from benchmarks.reliability.situations.row import Situation, measure

PAGE = "situations"
log = logging.getLogger(__name__)


def all_situations() -> dict[str, Situation]:
    """Return all situations by their words, in the order of the page."""
    parts = (models, updates, altered, checkpoints)
    return {one.words: one for part in parts for one in part.situations()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, write the page, and return the code to end with."""
    parser = results_parser(__doc__)
    parser.add_argument("--rows", nargs="+", default=[], metavar="WORD", help="rows whose words hold one of these")
    chosen = start(parser, arguments)
    if chosen.rewrite:
        rewrite(PAGE, lambda known: document(known["rows"]))
        return 0
    every, rows = all_situations(), {row["situation"]: row for row in known_rows(PAGE)}
    wanted = [name for name in every if not chosen.rows or any(word in name for word in chosen.rows)]
    failed = False
    for name in wanted:
        if not chosen.again and rows.get(name, {}).get("right"):
            continue
        row = measure(every[name])
        log.info("%s: %s%s, %s s", name, row["outcome"], "" if row["right"] else ", NOT RIGHT", row.get("seconds"))
        failed |= not row["right"]
        if row["outcome"] == "crashed":
            log.error("%s", row["crashed"])
            rows.pop(name, None)
            continue
        rows[name] = row
        found = [rows[known] for known in every if known in rows]
        publish(PAGE, {"rows": found}, document(found))
    refused = sum(row["outcome"] == "refused" for row in rows.values())
    if refused > MOST_REFUSED:
        log.error("expected at most %d refusals, got %d", MOST_REFUSED, refused)
    return int(failed or refused > MOST_REFUSED)


if __name__ == "__main__":
    raise SystemExit(main())
