"""A page a round: what each client's update was shown to give away, and what became of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eval.audit.recorded_update import RecordedUpdate
from eval.federations.file_names import as_file_name, free_file
from eval.federations.screening import Screening
from eval.io import jsonl
from eval.report.blocks import DefinitionList, Paragraph, Report, Section, TableBlock
from eval.report.render_html import render_html
from fl.runtime.atomic_files import make_folder

ROWS, PAGE = "screenings.jsonl", "report.html"
SCHEMA_VERSION = 1
"""Of the rows' form."""
LEAD = (
    "An update counts as leaked where an attack recovered something from it and proved that, without the true images, "
    "in the time that it had. Anything else is no proof that nothing leaks."
)


@dataclass(frozen=True, kw_only=True)
class RoundReports:
    """Keeps what screenings found, in a folder a round.

    Several processes may write to one folder: rows are appended under a lock, and the page is made of all of them.

    Attributes:
        folder: that holds `round-N/screenings.jsonl` and `round-N/report.html`.
        record: whether each update is kept beside them, as a file that `hyperleak audit update` reads. It holds what
            leaks.
    """

    folder: Path
    record: bool = False

    def add(self, recorded: RecordedUpdate, screening: Screening, words: str) -> Path:
        """Add one client's row to the page of its round, and return the page.

        Args:
            recorded: the update.
            screening: of it.
            words: what became of it.
        """
        number = recorded.origin.get("round", "unknown")
        place = self.folder / f"round-{as_file_name(number)}"
        make_folder(place)
        client = recorded.origin.get("client", "unknown")
        row = {
            "schema_version": SCHEMA_VERSION,
            **asdict(screening),
            "round": number,
            "client": client,
            "origin": dict(recorded.origin),
            "training": asdict(recorded.training),
            "response": words,
        }
        if self.record and recorded.after:
            kept = free_file(place / f"client-{as_file_name(client)}.npz")
            recorded.save(kept)
            row["update"] = kept.name
        jsonl.write_rows(place / ROWS, [row])
        with jsonl.locked(place):
            page = render_html(_report(jsonl.read_rows(place / ROWS), number))
            jsonl.write_text(place / PAGE, page)
        return place / PAGE


def _report(rows: list[dict[str, Any]], number: str) -> Report:
    """Return the page of one round."""
    leaked = [row["client"] for row in rows if row["verdict"] == "leaked"]
    failed = [row["client"] for row in rows if row["verdict"] == "failed"]
    said = [f"Shown to leak: {', '.join(leaked)}." if leaked else "No update was shown to leak."]
    if failed:
        said.append(f"Could not be screened: {', '.join(failed)}.")
    return Report(
        title=f"Round {number}: {len(rows)} update{'s' if len(rows) != 1 else ''} screened",
        lead=" ".join(said),
        facts=[(name, value) for name, value in sorted(_shared_origin(rows).items())],
        sections=[
            Section("updates", "Updates", [Paragraph(LEAD), _table(rows)]),
            *(Section(f"client-{i}", f"Client {row['client']}", _details(row)) for i, row in enumerate(rows)),
        ],
    )


def _shared_origin(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Return what all updates of a round have in common of their origin."""
    first: Mapping[str, str] = rows[0]["origin"]
    return {name: value for name, value in first.items() if all(row["origin"].get(name) == value for row in rows)}


def _table(rows: list[dict[str, Any]]) -> TableBlock:
    return TableBlock(
        caption="One row for each update that was screened.",
        columns=["client", "verdict", "what is shown", "response", ">seconds"],
        rows=[
            [
                row["client"],
                row["verdict"],
                "; ".join(f"{one['kind']} ({one['attack']})" for one in reversed(row["exposures"])) or "nothing",
                row["response"],
                f"{row['seconds']:.1f}",
            ]
            for row in rows
        ],
    )


def _details(row: dict[str, Any]) -> list[Any]:
    """Return what was known of an update, and what each attack came to."""
    training = {name: value for name, value in row["training"].items() if value not in (None, 0.0)}
    known = json.dumps(training) if training else "nothing"
    entries = [
        ("Finding", row["reason"]),
        ("Training, as far as known", known),
        *row["tried"].items(),
        *(("Note", note) for note in row["notes"]),
    ]
    if "update" in row:
        entries.append(("Recorded as", row["update"]))
    return [DefinitionList([(str(term), str(value)) for term, value in entries])]
