"""What every benchmark needs: a description of the machine, and results written whole."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fl.files import replacing

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
    }


def publish(name: str, result: Mapping[str, Any], lines: Sequence[str]) -> None:
    """Write `results/name.json` and `results/name.md`, each in one piece."""
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({"machine": machine(), **result}, indent=1, allow_nan=False)
    described = ", ".join(f"{k} {v}" for k, v in machine().items())
    for path, content in (
        (RESULTS / f"{name}.json", text),
        (RESULTS / f"{name}.md", "\n".join([*lines, "", f"Machine: {described}."])),
    ):
        with replacing(path) as file:
            file.write(content.encode() + b"\n")


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
