"""Plan past the machine: `python -m benchmarks.performance.large_scale [--only PART ...]`.

Measures what one client, cell and parameter cost (every case in a process of its own, on one thread), counts what a GPU
would have to do, and simulates workers that share a run. A part that is left out keeps what was measured last.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from benchmarks.common import RESULTS, machine, publish, rewrite
from benchmarks.performance.large_scale import check, federation_costs, folder_costs, operation_counts, workload
from benchmarks.performance.large_scale.page import document
from benchmarks.performance.scaling import apart

NAME = "large_scale"
log = logging.getLogger(__name__)


def clients() -> list[dict[str, Any]]:
    """Measure federations of many clients."""
    measure, count = federation_costs.clients, federation_costs.CLIENTS
    return [
        {"method": name, **apart(measure, name, count, federation_costs.SCORED)} for name in federation_costs.COUNTED
    ]


def aggregation() -> list[dict[str, Any]]:
    """Measure the uploads that a server holds, of two methods."""
    given = federation_costs.AGGREGATED
    return [
        apart(federation_costs.aggregation, name, given["clients"], given["width"]) for name in ("fedavg", "scaffold")
    ]


def networks() -> list[dict[str, float]]:
    """Measure networks of growing size."""
    return [apart(federation_costs.network, width) for width in federation_costs.WIDTHS]


def folder() -> dict[str, float]:
    """Measure a folder of many cells."""
    return apart(folder_costs.folder, folder_costs.GRID["seeds"], folder_costs.GRID["attacks"])


def disk() -> dict[str, float]:
    """Measure the disk."""
    return folder_costs.disk(folder_costs.CLAIMS, folder_costs.DISK_CELLS)


def planned() -> dict[str, float]:
    """Measure a plan of many clients."""
    given = folder_costs.MANY_CLIENTS
    return apart(folder_costs.many_clients, given["clients"], given["attacks"], {"name": "mnist"})


PARTS: dict[str, Callable[[], Any]] = {
    "clients": clients,
    "states": lambda: apart(federation_costs.states),
    "hypernetwork": lambda: apart(federation_costs.hypernetwork),
    "views": lambda: apart(federation_costs.views, 8),
    "aggregation": aggregation,
    "networks": networks,
    "counts": lambda: apart(operation_counts.counts),
    "folder": folder,
    "disk": disk,
    "planned": planned,
    "check": check.compare,
    "gpu": workload.gpu,
}
"""What is measured, under the names of the results."""
SIMULATED, RESTS_ON = "scenarios", ("clients", "counts", "disk", "planned", "check", "gpu")
"""Where the results have what was simulated, and the parts whose figures enter it."""


def known_parts(before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a result that are there, each with its processor."""
    found = {part: before[part] for part in (*PARTS, "start", SIMULATED) if part in before}
    own = before.get("processors", {})
    return {**found, "processors": {part: own[part] for part in found if part in own}}


def with_simulation(known: dict[str, Any], measured: Collection[str]) -> dict[str, Any]:
    """Return the parts with what is simulated of them, where all are there; anew if what it rests on was measured."""
    is_known = SIMULATED in known and not any(part in measured for part in RESTS_ON)
    if all(part in known for part in PARTS) and not is_known:
        known["start"] = check.seconds_to_start(known["check"]) + known["planned"]["seconds_prepare"]
        known[SIMULATED] = workload.scenarios(known)
    return known


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is asked for, simulate, and publish."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--only", nargs="*", default=[*PARTS], choices=[*PARTS], help="measure these parts alone")
    asked.add_argument("--rewrite", action="store_true", help="write the page anew from what was measured")
    given = asked.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if given.rewrite:
        rewrite(NAME, document)
        return
    measured = {}
    for part in given.only:
        log.info("%s", part)
        measured[part] = PARTS[part]()
    path = RESULTS / f"{NAME}.json"
    known = known_parts(json.loads(path.read_text()) if path.exists() else {}) | measured
    known["processors"] |= dict.fromkeys(measured, machine()["processor"])
    known = with_simulation(known, measured)
    publish(NAME, known, document(known) if SIMULATED in known else ["Not all parts are measured."])


if __name__ == "__main__":
    main()
