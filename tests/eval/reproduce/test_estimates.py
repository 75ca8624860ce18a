"""Estimates of committed cells beside the seconds that these took: how many come out within a factor of two."""

from statistics import fmean

import pytest

import attacks
from defenses import defenses
from eval.experiment.serialization import build
from eval.reproduce import cost
from eval.reproduce.cost import client_images, watched_updates
from eval.run import estimate
from eval.run.estimate import committed_cells
from eval.run.unit_costs import TrainingWork, attack_seconds, network_work, template_task, training_seconds
from fl.method import methods

AT_HAND = {"fashion_mnist": (30_939, 5_000), "cifar10": (15_000, 5_000), "cifar100": (10_000, 2_000)}
"""Training and test images of data sets of which a part was at hand when the cells were computed."""


pytestmark = pytest.mark.filterwarnings("ignore::fl.settings.FormerNameWarning")  # of cells that are older


@pytest.fixture(autouse=True)
def _as_computed(monkeypatch):
    monkeypatch.setattr(cost, "IMAGES", {**cost.IMAGES, **AT_HAND})


@pytest.fixture(scope="module")
def cells():
    """What committed cells that a CPU computed state of themselves, by id."""
    found = committed_cells()
    training = {cell: found[about["settings"].get("training", cell)]["settings"] for cell, about in found.items()}
    return {cell: about for cell, about in found.items() if training[cell]["device"] == "cpu"}


def counted(about, cells):
    """The seconds of a cell by counts alone."""
    settings = about["settings"]
    of = settings if settings["kind"] == "training" else cells[settings["training"]]["settings"]
    data = {"task": of["task"], "federation": of["federation"], "method": of["method"]}
    if settings["kind"] == "attack":
        data |= {"attack": settings["attack"], "observe": settings["observe"], "method": settings["method"]}
    experiment = build(data)
    images, model = client_images(experiment), experiment.task.model
    work = TrainingWork(
        task=template_task(model),
        network=network_work(model),
        federation=experiment.federation,
        method=methods.build(of["method"]),
        defense=defenses.build(of["defense"]),
        images=images,
    )
    if settings["kind"] == "training":
        return training_seconds(work)
    watched = watched_updates(experiment.observe, images)
    return attack_seconds(work, attacks.build(settings["attack"]), experiment.method[0].item, *watched)


def by_kind(cells):
    """The seconds of every cell by those of other cells of its kind, where there are any."""
    kinds = {}
    for cell, about in cells.items():
        settings = about["settings"]
        if settings["kind"] == "training":
            kinds.setdefault(estimate._training_kind(settings), []).append(cell)
        else:
            kinds.setdefault(estimate._attack_kind(settings, cells[settings["training"]]["settings"]), []).append(cell)
    found = {}
    for ids in kinds.values():
        for cell in ids:
            rounds = max(cells[cell]["settings"].get("federation", {}).get("rounds", 1), 1)
            each = [
                cells[other]["seconds"] / max(cells[other]["settings"].get("federation", {}).get("rounds", 1), 1)
                for other in ids
                if other != cell
            ]
            found |= {cell: fmean(each) * rounds} if each else {}
    return found


def share_within_two(cells, estimates):
    """Which share of the estimates is within a factor of two."""
    good = [0.5 <= cells[cell]["seconds"] / seconds <= 2 for cell, seconds in estimates.items()]
    return sum(good) / len(good)


def test_about_four_of_five_estimates_are_within_a_factor_of_two(cells):
    # some below what was found, as the next cells may have been computed beside other work
    counts = {cell: counted(about, cells) for cell, about in cells.items()}
    assert len(counts) > 700
    assert share_within_two(cells, counts) > 0.75
    trainings = {cell: seconds for cell, seconds in counts.items() if cells[cell]["settings"]["kind"] == "training"}
    assert share_within_two(cells, trainings) > 0.8
    # as the list of tables has it: by committed cells of the same kind, where there are others
    assert share_within_two(cells, counts | by_kind(cells)) > 0.78
