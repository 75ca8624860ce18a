"""What `run.json` says of a run: what it is, how far it is, and what became of each cell."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from eval.io import file_digests, jsonl
from eval.io.run_layout import MODULE_FOLDER, UNLIKE_DEFAULTS
from eval.run.cache_keys import Cell, run_id, source_digest, version
from eval.run.plan import Plan
from eval.run.run_directory import FILES, RUN, RunDir
from eval.run.run_options import Failure, Options

CUT_SHORT = "cut short by a time limit or an interrupt; figures are of what it had found by then"
"""The state of such a cell, in words."""
NOT_BEGUN = "not begun: the time limit came before it"


@dataclass(frozen=True)
class RunStatus:
    """What there is to be said of a run at any moment.

    Attributes:
        plan: of the run.
        folder: of the run.
        options: how it is done.
        failures: cells that could not be finished, by id; more may come.
        left_out: ids of cells that are no part of the run after all; more may come.
    """

    plan: Plan
    folder: RunDir
    options: Options
    failures: Mapping[str, Failure]
    left_out: Collection[str] = ()

    def write(self, status: str) -> None:
        """Write down what the run is and how far it is."""
        name = run_id(self.plan.experiment)
        about = {
            "id": name,
            "title": self.plan.experiment.title,
            "name": self.options.name,
            "command": self.options.command,
            "version": version(),
            "code": source_digest(),
            "status": status,
            **self._about_captures(),
            **({UNLIKE_DEFAULTS: words} if (words := self._unlike_defaults(name)) else {}),
            **({MODULE_FOLDER: self.options.module_folder} if self.options.module_folder else {}),
            "cells": [self._about(name, cell) for name, cell in self.plan.cells() if cell.id not in self.left_out],
        }
        jsonl.write_text(self.folder.path / RUN, json.dumps(file_digests.with_digest(about), indent=2) + "\n")

    def _unlike_defaults(self, name: str) -> str:
        """Return what is to be known of the methods' defaults, in the run called `name`."""
        if self.options.unlike_defaults is not None:
            return self.options.unlike_defaults
        before = self.folder.about_run()
        return str(before.get(UNLIKE_DEFAULTS) or "") if before.get("id") == name else ""

    def _about_captures(self) -> dict[str, object]:
        """Return what is to be known of updates of the user's own; nothing where there are none."""
        about: dict[str, object] = {"updates": [capture.digest for capture in self.plan.captures]}
        about |= {"notes": list(self.plan.notes), "contradiction": self.plan.contradiction}
        return {key: value for key, value in about.items() if value}

    def _about(self, name: str, cell: Cell) -> dict[str, object]:
        about: dict[str, object] = {"id": cell.id, "kind": cell.settings["kind"], "name": name}
        if self.folder.finished(cell):
            known = self.folder.about(cell)
            checked = {} if FILES in known else {"checked": False}
            return {**about, "status": "finished", "seconds": known["seconds"], "code": known["code"], **checked}
        if cell.id in self.failures:
            failure = self.failures[cell.id]
            return {**about, "status": "failed", "reason": failure.reason, "traceback": failure.traceback}
        if (cut := self.folder.latest(cell)) is not None:
            known = self.folder.about(cut)
            status = {"status": "cut short", "reason": CUT_SHORT, "found": cut.id}
            return {**about, **status, "seconds": known["seconds"], "code": known["code"]}
        if self.options.control.seconds_left <= 0:
            return {**about, "status": "waiting", "reason": NOT_BEGUN}
        return {**about, "status": "waiting"}
