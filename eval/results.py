"""The folder an experiment leaves: all of it or nothing.

`config.yaml` (every setting), `env.json` (versions and machine), `images.jsonl` (one line per attacked image),
`table.md`, and under `images/` a PNG (originals above, reconstructions below) and an `.npz` for every attack.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchvision.utils import save_image

from eval import config, store
from eval.experiment import Experiment
from eval.harness import Outcome, Picture

CONFIG, ROWS, ENVIRONMENT, TABLE = "config.yaml", "images.jsonl", "env.json", "table.md"
_PACKAGES = ("hyperleak", "torch", "torchvision", "numpy", "scipy", "scikit-image", "lpips", "opacus")


def check(out: Path, experiment: Experiment) -> None:
    """Whether `out` may be written: new, empty, or a result of the same experiment, which then is replaced.

    Raises:
        ValueError: there is something else.
    """
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir() or out.is_symlink():
        raise ValueError(f"expected a folder for results, got the file {out}; choose another --out")
    entries = {path.name for path in out.iterdir()}
    if not entries:
        return
    if not {CONFIG, ROWS} <= entries:
        raise ValueError(f"{out} holds something other than results of hyperleak; choose another --out")
    if (out / CONFIG).read_text(encoding="utf-8") != config.dump(experiment):
        raise ValueError(f"{out} holds results of other settings; choose another --out, or remove it")


def write(out: Path, experiment: Experiment, outcome: Outcome, *, device: str, table: str) -> None:
    """Write all files to a folder beside `out`, which then takes its place.

    Raises:
        ValueError: as `check`.
    """
    with _replacing(out, experiment) as folder:
        (folder / CONFIG).write_text(config.dump(experiment), encoding="utf-8")
        store.write_rows(folder / ROWS, outcome.rows)
        (folder / TABLE).write_text(table, encoding="utf-8")
        about = {**environment(device), "seconds": outcome.seconds}
        (folder / ENVIRONMENT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        _write_pictures(folder / "images", outcome.pictures)


def environment(device: str) -> dict[str, Any]:
    """What a number may depend on beside the settings: versions, device, threads, commit; no paths, no host name."""
    cuda = device.startswith("cuda")
    return {
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "system": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(device) if cuda else device,
        "threads": torch.get_num_threads(),
        "commit": _commit(Path(__file__).parents[1]),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit(checkout: Path) -> str | None:
    """The checkout's commit, with `+changes` where files differ from it; None outside a checkout."""
    if not (checkout / ".git").exists():
        return None
    try:
        commit, changes = (_git(checkout, *words) for words in (("rev-parse", "HEAD"), ("status", "--porcelain")))
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+changes" if changes else "")


def _git(checkout: Path, *words: str) -> str:
    command = ["git", "-C", str(checkout), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _write_pictures(folder: Path, pictures: Sequence[Picture]) -> None:
    folder.mkdir()
    for picture in pictures:
        both = torch.cat([picture.original, picture.reconstruction])
        if both.shape[1] in (1, 3):
            enlarged = max(1, 96 // both.shape[-1])  # whole pixels, so that nothing is smoothed away
            shown = both.nan_to_num(0).clamp(0, 1)
            shown = shown.repeat_interleave(enlarged, -1).repeat_interleave(enlarged, -2)
            save_image(shown, folder / f"{picture.name}.png", nrow=len(picture.original), pad_value=1.0)
        np.savez_compressed(
            folder / f"{picture.name}.npz",
            original=picture.original.numpy(),
            reconstruction=picture.reconstruction.numpy(),
        )


@contextmanager
def _replacing(out: Path, experiment: Experiment) -> Iterator[Path]:
    """A new folder that becomes `out` if all goes well and vanishes if not."""
    out = out.absolute()
    check(out, experiment)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        new, old = Path(scratch) / "new", Path(scratch) / "old"
        new.mkdir()
        yield new
        check(out, experiment)  # it may have changed meanwhile
        if out.exists():
            os.replace(out, old)
        try:
            os.replace(new, out)
        except OSError:
            if old.exists():
                os.replace(old, out)
            raise
        shutil.rmtree(old, ignore_errors=True)
