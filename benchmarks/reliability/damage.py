"""Flipped bits and cut ends in every kind of file that is read: `python -m benchmarks.reliability.damage`.

Each case changes one bit of one file, or cuts it off somewhere, and reads it as the commands do. The outcome is `named`
(one line that names the file), `same` (what is read is what was written: the change was in a part that says nothing),
`silent` (something else is read) or `traceback` (another error than the readers promise).
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.reliability import kills
from benchmarks.reliability.page import Figure, record
from eval.audit import captured_files
from eval.experiment import yaml_config
from eval.io import manifest, yaml12
from eval.report.load import load
from eval.run import runner
from eval.run.run_directory import RUN, RunDir, check_cell
from fl.data.sources import npz_files
from fl.models.building_blocks import pretrained
from fl.simulation import checkpoint


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        name: in words.
        paths: files of it.
        read: reads one of them, as plain data that can be compared.
        tells: whether the format can tell that a number in it has changed.
    """

    name: str
    paths: list[Path]
    read: Callable[[Path], Any]
    tells: bool = True


def make(place: Path) -> list[Kind]:
    """Return the files of every kind, and how they are read."""
    folder = place / "run"
    _finished(folder)
    tensors = {"fc.weight": torch.randn(20, 30, generator=torch.Generator().manual_seed(0)), "fc.bias": torch.ones(7)}
    paths = {kind: place / f"update{kind}" for kind in (".npz", ".pt", ".safetensors")}
    weights = {kind: place / f"weights{kind}" for kind in (".npz", ".pth", ".safetensors")}
    for path in (*paths.values(), *weights.values()):
        _write(path, tensors)
    stated = place / "stated.safetensors"
    _write(stated, tensors)
    digest = hashlib.sha256(stated.read_bytes()).hexdigest()
    stated.with_name("stated.safetensors.sha256").write_text(f"{digest}  {stated.name}\n")
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    npz_files.save_images(place / "data.npz", images, np.arange(40) % 10, [*"abcdefghij"])
    readers = [folder / name for name in ("config.yaml", "env.json", "images.jsonl", "rounds.jsonl", manifest.MANIFEST)]
    cells = [path for path in folder.glob("cells/*/*") if path.is_file()]
    return [
        *(Kind(f"update {kind}", [path], _update, kind != ".safetensors") for kind, path in paths.items()),
        *(Kind(f"weights {kind}", [path], _weights, kind != ".safetensors") for kind, path in weights.items()),
        Kind("weights .safetensors with .sha256 beside", [stated], _weights),
        Kind("data .npz", [place / "data.npz"], _data),
        Kind("readers' files", [*readers, *folder.glob("partitions/*.json")], lambda _: _run(folder)),
        Kind("run.json", [folder / RUN], lambda _: _run(folder)),
        Kind("pictures for readers", [*folder.glob("images/*")], lambda _: _changes(folder)),
        Kind("cells", cells, _cell),
        Kind("checkpoints", [*folder.glob("checkpoints/*/*.npz")], checkpoint.check_intact),
    ]


def _finished(folder: Path) -> None:
    """A finished run that keeps its checkpoints."""
    from eval.run import results

    run = RunDir(folder)
    with run.locked():
        plan = runner.prepare(yaml_config.read(yaml12.parse(kills.CONFIG)), device="cpu")
        runner.run(plan, run, runner.Options(keep_checkpoints=True))
        results.assemble(plan, run)


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    if path.suffix == ".npz":
        np.savez(path, **{name: value.numpy() for name, value in tensors.items()})  # type: ignore[arg-type]
    elif path.suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path)


def _plain(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: (str(value.dtype), value.shape, value.numpy().tobytes()) for name, value in tensors.items()}


def _update(path: Path) -> Any:
    return _plain(captured_files.load_update(path).update)


def _weights(path: Path) -> Any:
    return _plain(pretrained.read_weights(str(path)))


def _data(path: Path) -> Any:
    found = npz_files.read_pixels(path)
    return found.images.tobytes(), found.labels.tobytes(), found.class_names


def _run(folder: Path) -> Any:
    found = load(folder)
    return found.config_text, found.rows, found.rounds, found.metadata, found.environment, found.partitions


def _changes(folder: Path) -> None:
    for name, wrong in manifest.changed_files(folder):
        raise ValueError(f"{name} {wrong}")


def _cell(path: Path) -> Any:
    return check_cell(path.parent, path.parent.name)


def outcome(kind: Kind, path: Path, change: bytes, whole: Any) -> str:
    """Return what comes of reading a file with other content; the file is as before afterwards."""
    before = path.read_bytes()
    path.write_bytes(change)
    try:
        found = kind.read(path)
    except (ValueError, FileNotFoundError) as error:
        # a cell is named by whoever asks for it, as its folder
        named = path.name in str(error) or kind.name == "cells"
        return "named" if named else "unnamed"
    except Exception as error:  # noqa: BLE001 - what may not happen is counted
        return f"traceback ({type(error).__name__})"
    finally:
        path.write_bytes(before)
    return "same" if found == whole else "silent"


def measure(cases: int, seed: int, place: Path) -> dict[str, Counter[str]]:
    """Damage files so many times in all, kind by kind in turn; outcomes by kind."""
    draw, kinds = random.Random(seed), make(place)
    found: dict[str, Counter[str]] = {kind.name: Counter() for kind in kinds}
    for number in range(cases):
        kind = kinds[number % len(kinds)]
        path = draw.choice(sorted(kind.paths))
        data = bytearray(path.read_bytes())
        where = draw.randrange(len(data))
        if draw.random() < 0.25:
            data = data[:where]
        else:
            data[where] ^= 1 << draw.randrange(8)
        whole = kind.read(path)
        found[kind.name][outcome(kind, path, bytes(data), whole)] += 1
    return found


def figures(found: dict[str, Counter[str]], tells: dict[str, bool]) -> list[Figure]:
    """Return what stands on the page."""

    def count(word: str, *, told: bool) -> int:
        return sum(n for name, own in found.items() if tells[name] == told for key, n in own.items() if word in key)

    told = sum(sum(own.values()) for name, own in found.items() if tells[name])
    rest = sum(sum(own.values()) for name, own in found.items() if not tells[name])
    silent = count("silent", told=True)
    faults = sum(n for own in found.values() for key, n in own.items() if key.startswith(("traceback", "unnamed")))
    unable = f"{count('silent', told=False)} silent: .safetensors has no checksum (FILE.sha256 beside it is checked)"
    return [
        Figure("flipped bits and cut ends, formats that can tell: silent", told, "0", str(silent), silent == 0),
        Figure("the same, all formats: tracebacks, or files not named", told + rest, "0", str(faults), faults == 0),
        Figure("the same, .safetensors without a digest", rest, "said in the documents", unable, True),
    ]


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=40)
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as place:
        found = measure(given.cases, given.seed, Path(place))
    tells = {name: name not in {"update .safetensors", "weights .safetensors"} for name in found}
    own = figures(found, tells)
    record("damage", "python -m benchmarks.reliability.damage", own, {name: dict(own) for name, own in found.items()})
    for figure in own:
        sys.stdout.write(f"{figure.what}: {figure.found}\n")


if __name__ == "__main__":
    main()
