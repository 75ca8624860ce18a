"""The commands of published runs still plan the cells that are committed, so that none is computed again.

Only the images are missing: the digest of the data is taken from the committed cells.
"""

from __future__ import annotations

import json
import shlex
import tarfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eval import config
from eval.experiment import sweep
from eval.experiment.spec import Experiment
from eval.run.cache_keys import Cell, TrainedUpdates, attack_cell, training_cell
from eval.rundir import RunDir

ROOT = Path(__file__).parents[3]
ARCHIVES = ROOT / "docs/results/cells"
RUNS = {
    "systems-fashion-mnist": ".",
    "curves-systems": "hyperfedzero",
    "table3-emnist": ".",
    "leakage-over-training-handwriting": ".",
}
"""Archives, and where in them the run lies."""
pytestmark = pytest.mark.filterwarnings("ignore::fl.settings.FormerNameWarning")
"""The commands are of their time."""
every_run = pytest.mark.parametrize(("archive", "folder"), RUNS.items(), ids=RUNS)


@pytest.fixture
def run(tmp_path: Path, archive: str, folder: str) -> Path:
    """The folder of a committed run."""
    with tarfile.open(ARCHIVES / f"{archive}.tar.xz") as file:
        file.extractall(tmp_path, filter="data")
    return tmp_path / folder


def experiment(command: str) -> Experiment:
    """What `hyperleak run NAME --set KEY=VALUE ...` asks for."""
    _, _, name, *words = shlex.split(command)
    overrides = [value for option, value in pairwise(words) if option == "--set"]
    return config.load(ROOT / f"configs/{name}.yaml", overrides)


def planned(wanted: Experiment, data: str) -> Iterator[Cell]:
    """The cells of an experiment on data of this digest, with the attacks after each training."""
    for seed in wanted.seeds:
        for method in wanted.method:
            for defense in wanted.defense:
                own = sweep.experiment_of(wanted, method, None)
                world: Any = SimpleNamespace(task_spec=own.task, digest=data, device_kind="cpu")
                training = training_cell(world, own.federation, method.item, defense.item, seed)
                yield training
                for attack in wanted.attack:
                    if attack.against and method.label not in attack.against:
                        continue
                    part = sweep.experiment_of(wanted, method, attack)
                    observed = part.observed_methods()[method.label]
                    for number in part.rounds:
                        updates = TrainedUpdates(training, number, observed, part.threat, part.observe)
                        yield attack_cell(updates, attack.item, part.score, None)


def committed(run: Path) -> dict[str, dict[str, Any]]:
    """The settings of the cells that the run lists, by id."""
    listed: Sequence[dict[str, Any]] = json.loads((run / "run.json").read_text())["cells"]
    return {cell["id"]: json.loads((run / f"cells/{cell['id']}/cell.json").read_text())["settings"] for cell in listed}


@every_run
def test_a_published_command_plans_the_committed_cells(run: Path) -> None:
    cells = committed(run)
    (data,) = {settings["data"] for settings in cells.values() if settings["kind"] == "training"}
    wanted = experiment(json.loads((run / "run.json").read_text())["command"])
    found = list(planned(wanted, data))
    assert [cell.settings for cell in found if cell.id not in cells] == []
    assert {cell.id for cell in found} == set(cells)
    folder = RunDir(run)
    assert all(folder.finished(cell) for cell in found)
