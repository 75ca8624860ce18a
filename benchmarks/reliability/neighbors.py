"""The wheel beside the libraries that its users have: `python -m benchmarks.reliability.neighbors`.

Builds the wheel, installs it into an empty environment together with Flower, NVFlare, Opacus, PEFT and transformers in
one call of pip, and asks of it: whether pip finds versions that go together, whether the frameworks and our adapters
are imported in one process, how long imports take, and whether an audit runs outside of a checkout. It needs a network,
about ten minutes and eight gigabytes; `--keep FOLDER` keeps the environment, and the next call uses it.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.common import publish, table

ROOT = Path(__file__).parents[2]
PAGE = "neighbors"
NEIGHBORS = ("flwr", "nvflare", "opacus", "peft", "transformers")
TOGETHER = "import flwr, nvflare, opacus, peft, transformers, hyperleak.flower, hyperleak.nvflare"
AUDIT = """
import torch, hyperleak
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 64), torch.nn.Sigmoid(), torch.nn.Linear(64, 10))
report = hyperleak.audit(model, torch.rand(1, 1, 28, 28), torch.tensor([3]))
assert report.findings[0].verified, report.findings[0].verdict
"""
TIMED = {
    "import hyperleak": "import hyperleak",
    "import torch": "import torch",
    "hyperleak.audit, once torch is there": "import hyperleak; hyperleak.audit",
    "hyperleak.flower, once torch and Flower are there": "import hyperleak.flower",
}
FIRST = {
    "hyperleak.audit, once torch is there": "import torch",
    "hyperleak.flower, once torch and Flower are there": "import torch, flwr.clientapp, flwr.serverapp",
}
"""What is imported before the clock runs."""
REPEATS = 5
log = logging.getLogger(__name__)


def install(folder: Path) -> Path:
    """Return the Python of an environment that has the wheel and its neighbors, made anew if it is not there."""
    python = folder / "environment" / "bin" / "python"
    if not python.exists():
        _call([sys.executable, "-m", "venv", str(folder / "environment")])
    _call([str(python), "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(folder / "wheels"), str(ROOT)])
    (wheel,) = (folder / "wheels").glob("hyperleak-*.whl")
    _call([str(python), "-m", "pip", "install", "-q", "--force-reinstall", "--no-deps", str(wheel)])
    _call([str(python), "-m", "pip", "install", "-q", str(wheel), *NEIGHBORS])
    return python


def measure(python: Path, folder: Path) -> dict[str, Any]:
    """Return what the environment came to."""
    checked = _try([str(python), "-m", "pip", "check"], folder)
    listed = _call([str(python), "-m", "pip", "list", "--format=freeze"]).splitlines()
    versions = dict(line.split("==") for line in listed if line.split("==")[0] in (*NEIGHBORS, "hyperleak", "torch"))
    wheel = next((folder / "wheels").glob("*.whl"))
    return {
        "versions": versions,
        "clashes": checked,
        "together": _try([str(python), "-c", TOGETHER], folder),
        "audit": _try([str(python), "-c", AUDIT], folder),
        "seconds": {name: _seconds(python, FIRST.get(name, ""), code, folder) for name, code in TIMED.items()},
        "wheel_bytes": wheel.stat().st_size,
    }


def _seconds(python: Path, first: str, code: str, folder: Path) -> float:
    """Return the median time of an import in a process of its own."""
    lines = f"{first}\nimport time\nbegan = time.perf_counter()\n{code}\nprint(time.perf_counter() - began)"
    return statistics.median(float(_call([str(python), "-c", lines], folder)) for _ in range(REPEATS))


def _try(words: Sequence[str], folder: Path) -> str:
    """Return the last line of what went wrong, or nothing."""
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stdout + done.stderr).strip().splitlines()[-1]


def _call(words: Sequence[str], folder: Path | None = None) -> str:
    began = time.monotonic()
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words[1:4])} failed: {done.stderr.strip()[-2000:]}")
    log.info("%s: %.0f s", " ".join(words[1:4]), time.monotonic() - began)
    return done.stdout


def document(known: dict[str, Any]) -> list[str]:
    """Return the lines of the page."""
    return [
        "# The wheel beside other libraries",
        "",
        "The wheel was installed into an empty environment together with its neighbors, by one call of pip. What is "
        "checked runs there, outside of a checkout.",
        "",
        *table(["package", "version"], sorted(known["versions"].items())),
        "",
        *table(
            ["check", "outcome"],
            [
                ["`pip check` finds no clash", known["clashes"] or "yes"],
                ["all are imported in one process, our adapters with them", known["together"] or "yes"],
                ["an audit confirms the picture of a small network", known["audit"] or "yes"],
                ["size of the wheel", f"{known['wheel_bytes'] / 2**20:.2f} MiB"],
            ],
        ),
        "",
        f"Seconds are medians of {REPEATS} processes. Torch takes its own time, which is a line apart.",
        "",
        *table(["import", "seconds"], [[name, f"{value:.2f}"] for name, value in known["seconds"].items()]),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="folder of the environment; else it is removed afterwards")
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with TemporaryDirectory() if chosen.keep is None else nullcontext(chosen.keep) as place:
        folder = Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        known = measure(install(folder), folder)
    publish(PAGE, known, document(known))


if __name__ == "__main__":
    main()
