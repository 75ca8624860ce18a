"""A federation's state in one file: written whole or not at all, and refused if a bit of it has changed."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl.runtime import tensor_archives
from fl.runtime.atomic_files import atomic_write, make_folder
from fl.simulation.client_round import ClientState
from fl.simulation.federation_state import FederationState
from fl.tensors import Payloads, Tensors, dense

DAMAGED = (OSError, ValueError, EOFError, LookupError, AttributeError, RuntimeError, zipfile.BadZipFile)
"""What numpy and zipfile raise for a damaged `.npz` file."""
_DIGEST, _ROUND, _SEED, _PAYLOADS = "sha256", "round", "seed", "payloads"


def save(path: Path, run: FederationState) -> None:
    """Write server and clients to `path` (.npz): to a temporary file first, which then takes its place."""
    arrays: dict[str, Any] = {_ROUND: np.array(run.server.round), _SEED: np.array(run.seed)}
    arrays[_PAYLOADS] = np.array(json.dumps(_payloads(run)))  # some may be empty
    arrays |= {name: dense(value).detach().cpu().numpy() for name, value in _named_tensors(run)}
    arrays[_DIGEST] = np.array(_digest(arrays))
    make_folder(path.parent)
    with atomic_write(path) as file:
        np.savez(file, **arrays)


def load(path: Path, run: FederationState) -> None:
    """Bring a federation of the same settings to the state in `path`; it goes on as if it had never stopped.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or of a federation with another seed, model or clients; `run` stays as it is.
    """
    arrays = _read_arrays(path)
    number, seed = int(arrays.pop(_ROUND)), int(arrays.pop(_SEED))
    payloads = json.loads(str(arrays.pop(_PAYLOADS, "[]")))
    if seed != run.seed:
        raise ValueError(f"expected a checkpoint of seed {run.seed}, got one of seed {seed}: {path}")
    _check(path, arrays, run)
    like = {name: dense(value) for name, value in _named_tensors(run)}

    def tensor(name: str) -> Tensor:
        return torch.from_numpy(arrays[name]).to(like[name] if name in like else next(iter(like.values())).device)

    parts = _nest({name: tensor(name) for name in arrays}, payloads)
    server = parts.get("server", {})
    run.server = replace(
        run.server,
        shared=_in_order(server.get("shared", {}), run.server.shared),
        buffers=_in_order(server.get("buffers", {}), run.server.buffers),
        own=server.get("own", {}),
        round=number,
    )
    clients = parts.get("clients", {})
    run.clients = [_read_client(clients.get(str(i), {}), state) for i, state in enumerate(run.clients)]


def check_intact(path: Path) -> None:
    """Check that the file `path` is as it was written.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged.
    """
    _read_arrays(path)


def _read_arrays(path: Path) -> dict[str, Any]:
    """Return what a checkpoint holds, if it is whole."""
    try:
        arrays: dict[str, Any] = tensor_archives.read_arrays(path)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise ValueError(f"expected a whole checkpoint, got {path}: {error}; remove it to start anew") from error
    digest = arrays.pop(_DIGEST, None)
    if digest is None or str(digest) != _digest(arrays):
        raise ValueError(f"expected a whole checkpoint, but {path} has changed since it was written; remove it")
    return arrays


def _read_client(parts: Mapping[str, Any], like: ClientState) -> ClientState:
    return ClientState(
        private=_in_order(parts.get("private", {}), like.private),
        memory=parts.get("memory", {}),
        buffers=_in_order(parts.get("buffers", {}), like.buffers),
        personal={k: _in_order(parts.get("personal", {}).get(k, {}), part) for k, part in like.personal.items()},
    )


def _in_order(values: Mapping[str, Any], like: Mapping[str, Any]) -> Any:
    return {name: values[name] for name in like}


def _named_tensors(run: FederationState) -> Iterator[tuple[str, Any]]:
    """Yield every tensor of server and clients, under a path of names."""
    yield from _flatten("server/shared", run.server.shared)
    yield from _flatten("server/buffers", run.server.buffers)
    yield from _flatten("server/own", run.server.own)
    for i, state in enumerate(run.clients):
        yield from _flatten(f"clients/{i}/private", state.private)
        yield from _flatten(f"clients/{i}/memory", state.memory)
        yield from _flatten(f"clients/{i}/buffers", state.buffers)
        yield from _flatten(f"clients/{i}/personal", state.personal)


def _flatten(prefix: str, values: Tensors | Payloads | dict[str, Tensor]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(f"{prefix}/{name}", value)
        else:
            yield f"{prefix}/{name}", value


def _payloads(run: FederationState) -> list[str]:
    """Return every payload of server and clients, empty ones included."""
    own = [f"server/own/{name}" for name in run.server.own]
    return own + [f"clients/{i}/memory/{name}" for i, state in enumerate(run.clients) for name in state.memory]


def _nest(flat: Mapping[str, Tensor], payloads: Sequence[str]) -> dict[str, Any]:
    """Return the nested names again; parameter names hold dots, never slashes."""
    result: dict[str, Any] = {}
    for path in payloads:
        place = result
        for folder in path.split("/"):
            place = place.setdefault(folder, {})
    for path, value in flat.items():
        *folders, name = path.split("/")
        place = result
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = value
    return result


def _check(path: Path, arrays: Mapping[str, Any], run: FederationState) -> None:
    """Parameters and buffers must be those of this federation; what server and clients remember may have grown."""
    mine = {name: dense(value).cpu().numpy() for name, value in _named_tensors(run)}
    expected, found = (
        {n: f"{v.dtype} {v.shape}" for n, v in every.items() if "/memory/" not in n and "/own/" not in n}
        for every in (mine, arrays)
    )
    for name in sorted({*expected, *found}):
        if expected.get(name) != found.get(name):
            raise ValueError(
                f"expected {name} {expected.get(name, '(absent)')} in {path}, got {found.get(name, 'none')}: "
                "it is of another model, method or number of clients"
            )


def _digest(arrays: Mapping[str, Any]) -> str:
    total = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        total.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        total.update(array.tobytes())
    return total.hexdigest()
