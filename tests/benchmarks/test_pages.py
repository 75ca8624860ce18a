"""Pages of benchmarks are what their code makes of what was measured, so that words and figures do not drift apart."""

import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common
from benchmarks.common import RESULTS
from benchmarks.exact import cascade, cascade_batches, cascade_ends, residual_page
from benchmarks.exact.residual_victims import CASES
from benchmarks.hyperfl import peel, published_hyperfl, several_steps
from benchmarks.leakage import (
    defenses,
    framework_filters,
    leakage,
    own_models,
    presets,
    quickstart,
    rog_spaces,
    same_network,
    settings,
)
from benchmarks.peers import __main__ as peers
from benchmarks.peers import report, speed
from benchmarks.performance import gpu, peer_rounds, rounds, scaling
from benchmarks.performance.large_scale import page as large_scale
from benchmarks.reliability import screening
from benchmarks.reliability.situations import page as situations

Known = dict[str, Any]


def loop_shares() -> dict[str, float]:
    """What `rounds` takes from the page on scaling."""
    return {loop["name"]: loop["share"] for loop in measured("scaling")["d"]["loops"]}


def measured(name: str) -> Known:
    """The committed figures of a page."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def turns(known: Known) -> int:
    """How often every side of `peer_rounds` was timed."""
    return len(next(iter(known["networks"]["hyperfl-grey"]["seconds"].values())))


DOCUMENTS: dict[str, Callable[[Known], Sequence[str]]] = {
    "cascade": lambda known: cascade.document(known["rows"], known["first"], known["timed_on"]["processor"]),
    "cascade_batches": lambda known: cascade_batches.document(known["rows"], known["first"]),
    "cascade_ends": lambda known: cascade_ends.document(known["rows"]),
    "defenses": lambda known: defenses.document(known["rows"], known["search"]),
    "framework_filters": lambda known: framework_filters.document(known["rows"], known["cosines"]),
    "gpu": gpu.page,
    "hyperfl_fashion_mnist": leakage._known,
    "large_scale": large_scale.document,
    "own_models": lambda known: own_models.document(known["rows"]),
    "peel": lambda known: peel.document([peel.Row(**row) for row in known["rows"]]),
    "peer_rounds": lambda known: peer_rounds.page(
        {name: peer_rounds.Figures(**figures) for name, figures in known["networks"].items()}, turns(known)
    ),
    "peers": lambda known: report.page(peers.IMAGES, peers.measured_before(known["comparisons"])),
    "peers_speed": lambda known: speed.page(peers.speeds_before(known["networks"])),
    "presets": lambda known: presets.document(known["cases"]),
    "published_hyperfl": lambda known: published_hyperfl.document(known["rows"]),
    "residual": lambda known: residual_page.document(CASES, known["rows"]),
    "quickstart": lambda known: quickstart.document(known["rows"]),
    "rog_spaces": lambda known: rog_spaces.document(
        known["rows"], list(dict.fromkeys(row["attack"] for row in known["rows"])), known["training"]
    ),
    "rounds": lambda known: rounds.page(known, loop_shares()),
    "same_network": lambda known: same_network.document(known["sets"]),
    "scaling": scaling.page,
    "screening": lambda known: screening.document(known["rows"]),
    "settings": lambda known: settings.document(known["sweeps"]),
    "situations": lambda known: situations.document(known["rows"]),
    "several_steps": lambda known: several_steps.page(known["searches"], known["read"]),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_page_is_what_the_code_writes_of_the_figures(name: str) -> None:
    known = measured(name)
    written = common._page(name, DOCUMENTS[name](known), known["machine"])
    assert (RESULTS / f"{name}.md").read_text() == written + "\n"


@pytest.mark.parametrize("page", sorted(RESULTS.glob("*.md")), ids=lambda page: page.stem)
def test_page_leads_to_its_command(page: Path) -> None:
    assert f"results/{page.name})" in (RESULTS.parents[1] / "docs" / "results" / "commands.md").read_text()


@pytest.mark.parametrize("module", sorted(set(common.SCRIPTS.values())))
def test_page_names_a_module_that_exists(module: str) -> None:
    assert importlib.util.find_spec(f"benchmarks.{module}") is not None


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_page_ends_with_its_code_and_the_machine_of_its_figures(path: Any) -> None:
    known = json.loads(path.read_text())
    assert path.with_suffix(".md").read_text().endswith(common._page(path.stem, [], known["machine"]) + "\n")
