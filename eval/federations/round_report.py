"""A page a round: what each client's update was shown to give away, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eval.audit.recorded_update import RecordedUpdate, TrainingFacts
from eval.federations.file_names import as_file_name, free_file
from eval.federations.screening import Screening
from eval.io import jsonl
from eval.report.blocks import DefinitionList, Paragraph, Report, Section, TableBlock
from eval.report.render_html import render_html
from fl.runtime.atomic_files import make_folder

ROWS, PAGE = "screenings.jsonl", "report.html"
SCHEMA_VERSION = 1
"""Version of the rows' form."""
LONGEST_NAME = 28
"""Characters of a client's name in tables and headings."""
OF_ONE_UPDATE = {"facts": "Known from", "beside the update, not looked at": "Beside the update, not looked at"}
"""What of an origin belongs to a single update, and how it is called there."""
LEAD = (
    "An update counts as leaked where an attack recovered something from it and proved that, without the true images, "
    "in the time that it had. It is not decided where nobody can say, as what was stated contradicts it, or no attack "
    "reads such an update. Anything else is no proof that nothing leaks."
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
    leaked = [_short(row["client"]) for row in rows if row["verdict"] == "leaked"]
    open_, failed = (
        [_short(row["client"]) for row in rows if row["verdict"] == verdict] for verdict in ("not decided", "failed")
    )
    shared = _shared_origin(rows)
    said = [f"Shown to leak: {', '.join(leaked)}." if leaked else "No update was shown to leak."]
    if open_:
        said.append(f"Not decided: {', '.join(open_)}.")
    if failed:
        said.append(f"Could not be screened: {', '.join(failed)}.")
    return Report(
        title=f"Round {number}: {len(rows)} update{'s' if len(rows) != 1 else ''} screened",
        lead=" ".join(said),
        facts=sorted(shared.items()),
        sections=[
            Section("updates", "Updates", [Paragraph(LEAD), _table(rows)]),
            *(_section(number, row, shared) for number, row in enumerate(rows)),
        ],
    )


def _shared_origin(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Return what all updates of a round have in common of their origin, beside what only describes an update."""
    first: Mapping[str, str] = rows[0]["origin"]
    return {
        name: value
        for name, value in first.items()
        if name not in {"client", *OF_ONE_UPDATE} and all(row["origin"].get(name) == value for row in rows)
    }


def _short(name: str) -> str:
    """Return the name of a client as far as a table has room for it; its section has all of it."""
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def _table(rows: list[dict[str, Any]]) -> TableBlock:
    return TableBlock(
        caption="One row for each update that was screened.",
        columns=["client", "verdict", "what is shown", "response", ">seconds"],
        rows=[
            [
                _short(row["client"]),
                row["verdict"],
                "; ".join(f"{one['kind']} ({one['attack']})" for one in reversed(row["exposures"])) or "nothing",
                row["response"].removesuffix(f": {row['reason']}"),
                f"{row['seconds']:.1f}",
            ]
            for row in rows
        ],
    )


def _section(number: int, row: dict[str, Any], shared: Mapping[str, str]) -> Section:
    return Section(f"client-{number}", f"Client {_short(row['client'])}", _details(row, shared))


def _details(row: dict[str, Any], shared: Mapping[str, str]) -> list[Any]:
    """Return what was known of an update, and what each attack came to."""
    known = TrainingFacts(**row["training"]).in_words()
    own = {name: value for name, value in row["origin"].items() if name not in shared and name != "client"}
    entries = [
        *([("Client", row["client"])] if row["client"] != _short(row["client"]) else []),
        ("Finding", row["reason"]),
        ("Training, as far as known", known),
        *((OF_ONE_UPDATE.get(name, name), value) for name, value in own.items()),
        *((f"Tried: {name}", outcome) for name, outcome in row["tried"].items()),
        *(("Note", note) for note in row["notes"]),
    ]
    if "update" in row:
        entries.append(("Recorded as", row["update"]))
    return [DefinitionList([(str(term), str(value)) for term, value in entries])]
