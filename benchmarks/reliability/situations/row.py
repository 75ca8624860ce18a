"""One situation: how it is given to the tool, what comes of it, and whether that is right."""

from __future__ import annotations

import json
import math
import re
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from torch import Tensor, nn
from typer.testing import CliRunner

import hyperleak
from eval import cli
from eval.audit.verdict import best_baseline
from eval.commands.terminal import FAILURE, USAGE

EXACT = 50.0
"""In dB: a picture from here on is right in all or nearly all of its 8-bit pixels."""
CLOSER = 1.0
"""In dB above the best guess: from here on a search found something."""
OWN_MODEL = "my_model:build"
"""What a command calls the user's model on the page."""
Kind = Literal["exact", "closer", "found", "hidden", "warned", "refused"]
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Right:
    """What the right outcome is.

    Attributes:
        kind: "exact" (a picture comes back to the pixel), "closer" (closer than the best guess), "found" (ids, columns
            or a label, as `figure` counts them), "hidden" (nothing comes back that a guess has not, and nothing is
            called verified), "warned" (attacked, and `words` are said of it) or "refused" (with `words`).
        words: that reason, notes or first line have to hold: the true cause.
        figure: for "found", the column of the attack's rows that has to be 1.
        why: in words for the page, how it is known.
    """

    kind: Kind
    words: tuple[str, ...] = ()
    figure: str = ""
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Python:
    """A call of `hyperleak.audit`.

    Attributes:
        model: the first argument.
        inputs: of the model, or None.
        targets: beside them.
        settings: by name.
        shown: how single arguments are written on the page, where their values are long.
    """

    model: nn.Module
    inputs: Any = None
    targets: Any = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    shown: Mapping[str, str] = field(default_factory=dict)

    def line(self) -> str:
        """Return the line of code."""
        given = ["model"] + ([] if self.inputs is None else [self.shown.get("inputs", "images"), "labels"])
        given += [f"{name}={self.shown.get(name, _literal(value))}" for name, value in self.settings.items()]
        return f"hyperleak.audit({', '.join(given)})"

    def report(self) -> Row:
        """Return what the audit found, as plain data, or an `error`.

        Raises:
            Exception: whatever is no refusal in words.
        """
        try:
            return hyperleak.audit(self.model, self.inputs, self.targets, **self.settings).plain()
        except (ValueError, TypeError, FileNotFoundError) as error:
            return {"error": str(error)}


@dataclass(frozen=True, kw_only=True)
class Command:
    """A call of the command.

    Attributes:
        model: `module:function` of the model.
        words: behind `hyperleak`; names of `folder`'s files are made whole.
        folder: of the files.
    """

    model: str
    words: Sequence[str]
    folder: Path

    def line(self) -> str:
        """Return the command as it is typed."""
        return "hyperleak " + " ".join(f"'{word}'" if set(word) & set("{ ") else word for word in self.words)

    def report(self) -> Row:
        """Return what the audit found, as plain data, or an `error`.

        Raises:
            RuntimeError: it ended with a traceback, or could not be done.
        """
        words = [self.model if word == OWN_MODEL else word for word in self.words]
        files = {path.name for path in self.folder.iterdir()}
        whole = [str(self.folder / word) if word in files else word for word in words]
        result = CliRunner().invoke(cli.app, [*whole, "--json", "--device", "cpu"])
        said = result.stderr.strip().replace(f"{self.folder}/", "")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        if result.exit_code == USAGE:
            return {"error": said.splitlines()[-1].removeprefix("error: ")}
        if result.exit_code == FAILURE:
            raise RuntimeError(said)
        return {**json.loads(result.stdout), "exit": result.exit_code}


Given = Python | Command


@dataclass(frozen=True, kw_only=True)
class Situation:
    """A situation in which people are.

    Attributes:
        words: it in plain words, which name its row.
        part: of the page.
        give: makes model and files in a folder, and says how they are given to the tool.
        right: what the outcome has to be.
    """

    words: str
    part: str
    give: Callable[[Path], Given]
    right: Right


def measure(situation: Situation) -> Row:
    """Return the row of a situation; `crashed` holds the traceback where there was one."""
    row: Row = {"situation": situation.words, "part": situation.part}
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            given = situation.give(Path(folder))
            row["given"] = given.line()
            began = time.process_time()
            found = given.report()
        except Exception:  # noqa: BLE001 - whatever it is, the row says so and the command ends with 1
            return {**row, "outcome": "crashed", "crashed": traceback.format_exc(), "right": False}
        row["seconds"] = round(time.process_time() - began, 1)
    failed = [f"{one['attack']}: {one['failed']}" for one in found.get("findings", ()) if one["failed"]]
    if failed:
        return {**row, "outcome": "crashed", "crashed": "; ".join(failed), "right": False}
    row |= _outcome(found)
    return {**row, "right": is_right(row, situation.right), "expected": situation.right.kind, "why": _why(situation)}


def _outcome(found: Mapping[str, Any]) -> Row:
    """Return what an audit came to, in the columns of the page."""
    if "error" in found:
        return {"outcome": "refused", "reason": found["error"], "said": ""}
    findings = found["findings"]
    notes = [note for note in found["notes"] if not re.match("only .* tried, as asked for", note)]
    said = "; ".join(filter(None, [found["mismatch"], *notes]))
    ran = [one for one in findings if one["images"] or one["labels"]]
    if not ran:
        reasons = [f"{one['attack']}: {one['refused'] or one['spared'] or one['verdict']}" for one in findings]
        return {"outcome": "refused", "reason": "; ".join(reasons), "said": said}
    best = max(ran, key=_merit)
    row: Row = max(best["images"], key=_gain, default={})
    wrong = [
        f"{one['attack']} at {image['psnr']:.1f} dB"
        for one in findings
        for image in one["images"]
        if one["verified"] is True and (image.get("psnr") or 100.0) < EXACT
    ]
    return {
        "outcome": "attacked",
        "attack": best["attack"],
        "figures": {key: row[key] for key in FIGURES if row.get(key) is not None},
        "features": [name for name in row.get("unscored", ()) if name.startswith("features")],
        "guess": best_baseline(row) if row.get("psnr") is not None else None,
        "verified": best["verified"],
        "wrongly verified": wrong,
        "exit": found.get("exit"),
        "others": {one["attack"]: _came_to(one) for one in findings if one is not best},
        "said": "; ".join(filter(None, [said, *best["notes"]])),
    }


FIGURES = ("psnr", "label_correct", "label_overlap", "label_error", "row_accuracy", "tokens_recall", "tokens_precision")
"""Columns of an attack's rows that the page has."""


def _merit(finding: Mapping[str, Any]) -> tuple[float, ...]:
    images = finding["images"]
    closest = max((one.get("psnr") or 0.0 for one in images), default=0.0)
    others = [one.get("tokens_recall") or one.get("row_accuracy") or 0.0 for one in images]
    counted = max(closest / 100, *others, 0.0)
    return (counted > 0 and finding["verified"] is True, counted)


def _came_to(finding: Mapping[str, Any]) -> str:
    """Return what became of an attack, in words."""
    words: str = finding["refused"] or finding["spared"] or finding["cut_short"] or finding["verdict"]
    return words


def _gain(row: Mapping[str, Any]) -> float:
    """Return how far an image is above the best guess of it, in dB."""
    psnr = row.get("psnr")
    return -math.inf if psnr is None else psnr - best_baseline(dict(row))


def is_right(row: Mapping[str, Any], right: Right) -> bool:
    """Return whether an outcome is the right one; nothing wrong may be called verified, whatever it is."""
    told = f"{row.get('reason', '')} {row.get('said', '')}"
    if any(word not in told for word in right.words) or row.get("wrongly verified"):
        return False
    if right.kind == "refused" or row["outcome"] == "refused":
        return right.kind == "refused" and row["outcome"] == "refused"
    figures = row["figures"]
    psnr, guess = figures.get("psnr"), row["guess"]
    if right.kind == "exact":
        return psnr is not None and psnr >= EXACT
    if right.kind == "closer":
        return psnr is not None and psnr >= guess + CLOSER
    if right.kind == "found":
        return figures.get(right.figure) == 1
    if right.kind == "hidden":
        return row["verified"] is not True and (psnr is None or psnr < guess + 10 * CLOSER)
    return bool(right.words)


def _why(situation: Situation) -> str:
    """Return how it is known that the outcome is right, in words."""
    words = {
        "exact": f"true picture, at least {EXACT:g} dB",
        "closer": f"true picture, at least {CLOSER:g} dB above the guess",
        "found": "true values, all of them",
        "hidden": "true picture: nothing found, nothing called verified",
        "warned": "what is wrong is named",
        "refused": "the reason names the cause",
    }
    return situation.right.why or words[situation.right.kind]


def _literal(value: Any) -> str:
    """Return a value as one writes it."""
    if isinstance(value, str | int | float | bool | None):
        return json.dumps(value) if isinstance(value, str) else repr(value)
    if isinstance(value, Path):
        return json.dumps(value.name)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        whole = ", ".join(_literal(item) for item in value)
        return f"[{whole}]" if isinstance(value, list) else f"({whole})"
    if isinstance(value, Tensor):
        return "example"
    return getattr(value, "__name__", type(value).__name__)
