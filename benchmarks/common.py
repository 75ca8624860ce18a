"""What every benchmark needs: a description of the machine, and results written whole."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fl.runtime.atomic_files import atomic_write

RESULTS = Path(__file__).parent / "results"
log = logging.getLogger(__name__)

SCRIPTS = {
    "cascade": "exact.cascade",
    "cascade_batches": "exact.cascade_batches",
    "cascade_ends": "exact.cascade_ends",
    "cascade_limits": "exact.cascade_limits",
    "defenses": "leakage.defenses",
    "dlg": "leakage.leakage",
    "dp": "performance.dp",
    "exact": "exact.exact",
    "framework_filters": "leakage.framework_filters",
    "gpu": "performance.gpu",
    "hyperfl_fashion_mnist": "leakage.leakage",
    "idlg": "leakage.leakage",
    "ig_photos": "leakage.leakage",
    "large_scale": "performance.large_scale",
    "lpm_inputs": "hyperfl.lpm_inputs",
    "lti": "leakage.lti",
    "neighbors": "reliability.neighbors",
    "own_models": "leakage.own_models",
    "peel": "hyperfl.peel",
    "peer_rounds": "performance.peer_rounds",
    "peers": "peers",
    "peers_speed": "peers",
    "presets": "leakage.presets",
    "published_hyperfl": "hyperfl.published_hyperfl",
    "quickstart": "leakage.quickstart",
    "residual": "exact.residual",
    "residual_defenses": "exact.residual_defenses",
    "residual_scale": "exact.residual_scale",
    "residual_stem": "exact.residual_stem",
    "residual_twins": "exact.residual_twins",
    "rog_photos": "leakage.rog_photos",
    "rog_spaces": "leakage.rog_spaces",
    "rounds": "performance.rounds",
    "same_network": "leakage.same_network",
    "scaling": "performance.scaling",
    "screening": "reliability.screening",
    "settings": "leakage.settings",
    "several_steps": "hyperfl.several_steps",
    "situations": "reliability.situations",
    "speed": "performance.speed",
    "whole": "leakage.whole",
}
"""The module of `benchmarks` that measures each page of `results`, for readers who check a table against its code."""


def machine() -> dict[str, Any]:
    """Return what the figures were measured on."""
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
    for path, content in (
        (RESULTS / f"{name}.json", text),
        (RESULTS / f"{name}.md", _page(name, lines, machine())),
    ):
        with atomic_write(path) as file:
            file.write(content.encode() + b"\n")


def rewrite(name: str, document: Callable[[dict[str, Any]], Sequence[str]]) -> None:
    """Write `results/name.md` anew from `results/name.json`, where the words changed and the figures did not."""
    known = json.loads((RESULTS / f"{name}.json").read_text())
    with atomic_write(RESULTS / f"{name}.md") as file:
        file.write(_page(name, document(known), known["machine"]).encode() + b"\n")


def known_rows(name: str) -> list[dict[str, Any]]:
    """Return the rows of `results/name.json`; none where nothing has been measured."""
    path = RESULTS / f"{name}.json"
    return list(json.loads(path.read_text())["rows"]) if path.exists() else []


def results_parser(description: str | None, *, has_again: bool = True) -> argparse.ArgumentParser:
    """Return a command line with `--rewrite`, and with `--again` where rows that are known are left out otherwise."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if has_again:
        parser.add_argument("--again", action="store_true", help="measure anew what the results have")
    parser.add_argument("--rewrite", action="store_true", help="write the page anew from what was measured")
    return parser


@dataclass(frozen=True, kw_only=True)
class RowBenchmark:
    """A benchmark whose rows are measured one after the other, each by itself.

    Attributes:
        page: name of its results.
        keys: columns by which a row is known; its case has one value for each, in this order.
        measure: makes the row of a case, of these values.
        document: makes the page of all rows.
    """

    page: str
    keys: Sequence[str]
    measure: Callable[..., dict[str, Any]]
    document: Callable[[Sequence[dict[str, Any]]], Sequence[str]]

    def main(
        self, description: str | None, cases: Iterable[tuple[object, ...]], arguments: Sequence[str] | None = None
    ) -> None:
        """Measure the cases that the results lack, each written as soon as it is done; or write the page anew.

        Args:
            description: of the command line.
            cases: all there are, in the order in which they are measured.
            arguments: of the command line; None takes the process's own.
        """
        chosen = start(results_parser(description), arguments)
        if chosen.rewrite:
            rewrite(self.page, lambda results: self.document(results["rows"]))
            return
        rows = [] if chosen.again else known_rows(self.page)
        known = {tuple(row[key] for key in self.keys) for row in rows}
        for case in cases:
            if case in known:
                continue
            rows.append(self.measure(*case))
            publish(self.page, {"rows": rows}, self.document(rows))
            log.info("%s", json.dumps(rows[-1]))


def start(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments (None: the process's own); log progress, and compute in one thread from here on."""
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    return chosen


def _page(name: str, lines: Sequence[str], measured_on: Mapping[str, Any]) -> str:
    machine_table = table([*measured_on], [[*measured_on.values()]])
    return "\n".join([*lines, "", _origin(name), "", "Measured on:", "", *machine_table])


def _origin(name: str) -> str:
    """Return the line that leads from a page back to its code, its figures and its command."""
    return (
        f"Code: `benchmarks.{SCRIPTS[name]}`. All figures: [{name}.json]({name}.json). "
        "Command: [redo a figure](../../docs/results/commands.md)."
    )


def hyperfl_conditions(heads: str, step_size: str) -> str:
    """Under which conditions figures on HyperFL were measured that leave the classifier's epoch out, in words.

    Args:
        heads: how those of the hypernetwork start.
        step_size: of hypernetwork and embedding.
    """
    return (
        f"Conditions of all that is said of HyperFL here: {heads} heads, step size {step_size}, pixels normalized "
        "inside the network, its classifier at rest (`head_epochs: 0`). The published algorithm trains the classifier "
        "for an epoch first and starts from wider heads, and then less comes back: "
        "[published_hyperfl.md](published_hyperfl.md)."
    )


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
