"""What an attack cell has found so far, portion by portion: where a run that was stopped goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attacks.base import NotApplicable, Reconstruction, Result
from eval.cells import code
from fl.checkpoint import DAMAGED
from fl.files import replacing
from fl.tensors import Tensors, dense

TENSORS = ("inputs", "labels", "fixed")
_TOLD, _PRIVATE = "told", "private"


class Found:
    """Results by the number of the attacked view, in a folder of their own.

    Args:
        folder: where they lie; made when the first are kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def keep(self, numbers: Sequence[int], results: Sequence[Result]) -> None:
        """Write down what came of views that were attacked together, at once."""
        self.folder.mkdir(parents=True, exist_ok=True)
        told = {"code": code(), "results": dict(zip(numbers, map(_plain, results), strict=True))}
        arrays = {f"{i}/{name}": a for i, r in zip(numbers, results, strict=True) for name, a in _arrays(r).items()}
        with replacing(self.folder / f"{numbers[0]:05d}.npz") as file:
            np.savez(file, **{_TOLD: np.array(json.dumps(told))}, **arrays)  # type: ignore[arg-type]

    def known(self) -> dict[int, Result]:
        """What was kept by the code that runs now: other code's results are not mixed with its own."""
        known: dict[int, Result] = {}
        for path in sorted(self.folder.glob("*.npz")):
            try:
                with np.load(path, allow_pickle=False) as file:
                    arrays = {name: file[name] for name in file.files}
            except DAMAGED:
                continue
            told = json.loads(str(arrays.pop(_TOLD)))
            if told["code"] == code():
                known |= {int(i): _result(plain, _of(i, arrays)) for i, plain in told["results"].items()}
        return known

    def forget(self) -> None:
        """Remove the folder: the cell has its rows."""
        if self.folder.is_dir():
            shutil.rmtree(self.folder)


def _plain(result: Result) -> dict[str, Any]:
    if isinstance(result, NotApplicable):
        return {"reason": result.reason}
    history = [float(value) for value in result.history]
    return {
        "objective": float(result.objective),
        "history": history,
        "knowledge": list(result.knowledge),
        "verified": result.verified,
        "note": result.note,
    }


def _arrays(result: Result) -> dict[str, Any]:
    if isinstance(result, NotApplicable):
        return {}
    found = {name: value for name in TENSORS if (value := getattr(result, name)) is not None}
    found |= {f"{_PRIVATE}/{name}": dense(value) for name, value in result.private.items()}
    return {name: value.detach().cpu().numpy() for name, value in found.items()}


def _result(told: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Result:
    if "reason" in told:
        return NotApplicable(told["reason"])
    private: Tensors = {
        name.removeprefix(f"{_PRIVATE}/"): value for name, value in tensors.items() if name.startswith(f"{_PRIVATE}/")
    }
    return Reconstruction(
        inputs=tensors.get("inputs"),
        labels=tensors.get("labels"),
        fixed=tensors.get("fixed"),
        objective=told["objective"],
        history=tuple(told["history"]),
        knowledge=tuple(told["knowledge"]),
        verified=told["verified"],
        note=told["note"],
        private=private,
    )


def _of(number: str, arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of one result."""
    own = {name: array for name, array in arrays.items() if name.startswith(f"{number}/")}
    return {name.removeprefix(f"{number}/"): torch.from_numpy(array) for name, array in own.items()}
