"""Updates in folders and parts of checkpoints, in few bits, and with tensors or files mixed up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from benchmarks.reliability.situations import networks
from benchmarks.reliability.situations.row import Given, Kind, Right, Situation
from benchmarks.reliability.situations.updates import (
    HOW,
    PART,
    SEARCH,
    State,
    arrays,
    change_of_one_step,
    command,
    difference,
    trained,
)

RANK = 4
FIRST = "1.weight"
"""The matrix of the perceptron that is given the pixels."""


def situations() -> Iterator[Situation]:
    """Yield all of them."""
    yield _situation("a folder of Transformers, weights that came back", _folder, "read out of the folder")
    yield _situation("a checkpoint in two files and their list", _parts)
    yield _situation(
        "a list of arrays before, tensors by name after", _list_and_names, "in the order of model.state_dict()"
    )
    yield _situation("what Flower's fit returns: arrays, a number and metrics", _answer, "taken out of a list of 3")
    yield _situation("arrays of the other byte order", _big_endian)
    yield _situation("integers of 8 bits with a scale each", _scaled_integers, "integers, written out", kind="closer")
    yield _situation("numbers in 8 bits, which nobody says", _few_bits, "as sent in 8 bits", kind="closer")
    yield _situation("float8 weights before and after", _float8, "float8_e4m3fn", kind="closer")
    yield _situation("weights before and after exchanged", _exchanged, "were both exchanged?", kind="warned")
    yield _situation("one tensor of another update", _one_wrong, "3.bias of other numbers", kind="warned")
    yield _situation("weights into which LoRA was merged", _merged, "merge_and_unload", kind="warned")


def _situation(words: str, give: Callable[[Path], Given], *told: str, kind: Kind = "exact") -> Situation:
    return Situation(words=words, part=PART, give=give, right=Right(kind=kind, words=told))


def _ends() -> tuple[State, State]:
    """Return the perceptron's state before and after one step on one picture."""
    model = networks.dense()
    return {name: value.detach() for name, value in model.state_dict().items()}, trained(model)


def _folder(folder: Path) -> Given:
    place = folder / "checkpoint-1"
    place.mkdir()
    safetensors.torch.save_file(_ends()[1], place / "model.safetensors")
    torch.save({"state": {}, "param_groups": []}, place / "optimizer.pt")
    return command(folder, "--after", "checkpoint-1", *HOW)


def _parts(folder: Path) -> Given:
    after = _ends()[1]
    listed = {}
    for number, name in enumerate(after):
        part = f"model-{number + 1:05}-of-{len(after):05}.safetensors"
        safetensors.torch.save_file({name: after[name]}, folder / part)
        listed[name] = part
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    return command(folder, "--after", "model.safetensors.index.json", *HOW)


def _list_and_names(folder: Path) -> Given:
    before, after = _ends()
    np.savez(folder / "sent.npz", *arrays(before).values())
    torch.save(after, folder / "returned.pt")
    return command(folder, "--before", "sent.npz", "--after", "returned.pt", *HOW)


def _answer(folder: Path) -> Given:
    torch.save((list(change_of_one_step().values()), 1, {"loss": 2.3}), folder / "fit.pt")
    return command(folder, "fit.pt", *HOW)


def _big_endian(folder: Path) -> Given:
    np.savez(
        folder / "update.npz", **{name: value.astype(">f4") for name, value in arrays(change_of_one_step()).items()}
    )
    return command(folder, "update.npz", *HOW)


def _steps(value: Tensor) -> Tensor:
    return value.abs().max() / 127


def _scaled_integers(folder: Path) -> Given:
    sent: State = {}
    for name, value in change_of_one_step().items():
        sent |= {name: (value / _steps(value)).round().to(torch.int8), f"{name}_scale": _steps(value)}
    torch.save(sent, folder / "update.pt")
    return command(folder, "update.pt", *HOW)


def _few_bits(folder: Path) -> Given:
    sent = {name: (value / _steps(value)).round() * _steps(value) for name, value in change_of_one_step().items()}
    np.savez(folder / "update.npz", **arrays(sent))
    return command(folder, "update.npz", *HOW)


def _float8(folder: Path) -> Given:
    for name, state in zip(("sent.pt", "returned.pt"), _ends(), strict=True):
        torch.save({key: value.to(torch.float8_e4m3fn) for key, value in state.items()}, folder / name)
    return command(folder, "--before", "sent.pt", "--after", "returned.pt", *HOW)


def _exchanged(folder: Path) -> Given:
    for name, state in zip(("sent.pt", "returned.pt"), _ends()[::-1], strict=True):
        torch.save(state, folder / name)
    return command(folder, "--before", "sent.pt", "--after", "returned.pt", *HOW)


def _one_wrong(folder: Path) -> Given:
    change, model = change_of_one_step(), networks.dense()
    other = difference(model, trained(model, first=1))
    np.savez(folder / "update.npz", **arrays({**change, "3.bias": other["3.bias"]}))
    return command(folder, "update.npz", *HOW)


def _merged(folder: Path) -> Given:
    """Write what one step on B of an adapter W + B A leaves in W, which is its gradient times the square of A."""
    change = change_of_one_step()
    lower = torch.randn(RANK, change[FIRST].shape[1], generator=torch.Generator().manual_seed(0))
    sent = {name: torch.zeros_like(value) for name, value in change.items()}
    sent[FIRST] = change[FIRST] @ lower.T @ lower / change[FIRST].shape[1]
    np.savez(folder / "update.npz", **arrays(sent))
    return command(folder, "update.npz", *HOW, attacks=("analytic", SEARCH))
