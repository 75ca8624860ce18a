"""What an attack cell has found so far, portion by portion: where a run that was stopped goes on."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attacks.base import NotApplicable, Reconstruction, Remark, Result
from eval.run.cache_keys import source_digest
from fl.runtime.atomic_files import atomic_write, make_folder
from fl.simulation.checkpoint import DAMAGED
from fl.tensors import Tensors, dense, map_values
from fl.view import ServerView

TENSORS = ("inputs", "labels", "fixed", "seen")
MIN_SECONDS_BETWEEN_WRITES = 1.0
"""Seconds of work that may be lost: what takes less is not worth a file."""
_TOLD, _PRIVATE = "told", "private"
log = logging.getLogger(__name__)


class AttackCheckpoint:
    """Results by the number of the attacked view, in a folder of their own.

    They count as known where the code that runs now has found them, and in the same updates.

    Args:
        folder: where they lie; made when the first are kept.
        views: what is attacked.

    Attributes:
        on_write: called when something has been written down.
    """

    def __init__(self, folder: Path, views: Sequence[ServerView]) -> None:
        self.folder = folder
        self.on_write: Callable[[], None] = lambda: None
        self._views, self._marks = views, dict[int, str]()
        self._open: dict[int, Result] = {}
        self._one_by_one = threading.Lock()
        self._last = time.monotonic()

    def save(self, numbers: Sequence[int], results: Sequence[Result]) -> None:
        """Write down what came of views that were attacked together, with what else has come since the last time.

        Where that fails (a full disk), the attack goes on, and a run that is stopped has more to do again.
        """
        with self._one_by_one:
            self._open.update(zip(numbers, results, strict=True))
            if time.monotonic() - self._last >= MIN_SECONDS_BETWEEN_WRITES:
                self._write_open()

    def flush(self) -> None:
        """Write down the results that have not been yet."""
        with self._one_by_one:
            if self._open:
                self._write_open()

    def _write_open(self) -> None:
        try:
            self._write(self._open)
        except OSError as error:
            log.warning("what the attack has found so far can't be kept in %s: %s", self.folder, error)
        else:
            self._open = {}
            self.on_write()
        self._last = time.monotonic()

    def _write(self, results: Mapping[int, Result]) -> None:
        make_folder(self.folder)
        told = {i: {"mark": self._view_digest(i), **_plain(result)} for i, result in results.items()}
        arrays = {f"{i}/{name}": a for i, result in results.items() for name, a in _arrays(result).items()}
        text = json.dumps({"code": source_digest(), "results": told})
        with atomic_write(self.folder / _name(min(results))) as file:
            np.savez(file, **{_TOLD: np.array(text)}, **arrays)  # type: ignore[arg-type]

    def load(self, first: int | None = None) -> dict[int, Result]:
        """Return what was kept; other code's results are not mixed with those to come.

        Args:
            first: the lowest number of views that were written down together; None is of all.
        """
        known: dict[int, Result] = {}
        for path in sorted(self.folder.glob("*.npz" if first is None else _name(first))):
            try:
                with np.load(path, allow_pickle=False) as file:
                    arrays = {name: file[name] for name in file.files}
                told = json.loads(str(arrays.pop(_TOLD)))
            except DAMAGED:
                continue
            if told["code"] == source_digest():
                mine = {i: plain for i, plain in told["results"].items() if self._is_same_view(int(i), plain["mark"])}
                known |= {int(i): _result(plain, _of(i, arrays)) for i, plain in mine.items()}
        return known

    def _is_same_view(self, number: int, mark: str) -> bool:
        return number < len(self._views) and self._view_digest(number) == mark

    def _view_digest(self, number: int) -> str:
        """Return a digest of a view's update; taken on demand, as most attacks end before anything is kept."""
        if number not in self._marks:
            self._marks[number] = _hash(self._views[number])
        return self._marks[number]


def _name(first: int) -> str:
    return f"{first:05d}.npz"


def _hash(view: ServerView) -> str:
    digest = hashlib.sha256()

    def take(value: Tensor) -> Tensor:
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return value

    for name in sorted(view.update):
        digest.update(name.encode())
        map_values({name: view.update[name]}, take)
    return digest.hexdigest()


def _plain(result: Result) -> dict[str, Any]:
    if isinstance(result, NotApplicable):
        return {"reason": result.reason, "limit": result.limit, "cut_short": result.cut_short}
    history = [float(value) for value in result.history]
    return {
        "objective": float(result.objective),
        "history": history,
        "knowledge": list(result.knowledge),
        "verified": result.verified,
        "note": result.note,
        "given_up": result.given_up,
        "cut_short": result.cut_short,
        "misfit": result.misfit,
        "relative_error": result.relative_error,
        "approximate": result.approximate,
        "remarks": sorted(result.remarks),
    }


def _arrays(result: Result) -> dict[str, Any]:
    if isinstance(result, NotApplicable):
        return {}
    found = {name: value for name in TENSORS if (value := getattr(result, name)) is not None}
    found |= {f"{_PRIVATE}/{name}": dense(value) for name, value in result.private.items()}
    return {name: _plain_array(value.detach().cpu()) for name, value in found.items()}


def _plain_array(value: Tensor) -> Any:
    """Return a tensor as an array, of bfloat16 in the next type that NumPy has."""
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


def _result(told: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Result:
    if "reason" in told:
        return NotApplicable(told["reason"], told["limit"], told["cut_short"])
    private: Tensors = {
        name.removeprefix(f"{_PRIVATE}/"): value for name, value in tensors.items() if name.startswith(f"{_PRIVATE}/")
    }
    return Reconstruction(
        inputs=tensors.get("inputs"),
        labels=tensors.get("labels"),
        fixed=tensors.get("fixed"),
        seen=tensors.get("seen"),
        objective=told["objective"],
        history=tuple(told["history"]),
        knowledge=tuple(told["knowledge"]),
        verified=told["verified"],
        note=told["note"],
        given_up=told["given_up"],
        cut_short=told["cut_short"],
        misfit=told["misfit"],
        relative_error=told.get("relative_error"),
        approximate=told.get("approximate", False),
        remarks=frozenset(map(Remark, told.get("remarks", ()))),
        private=private,
    )


def _of(number: str, arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of one result."""
    own = {name: array for name, array in arrays.items() if name.startswith(f"{number}/")}
    return {name.removeprefix(f"{number}/"): torch.from_numpy(array) for name, array in own.items()}
