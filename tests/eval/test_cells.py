"""What a cell is known by: everything its numbers depend on, and nothing else."""

import pytest
from support.runs import tiny
from support.tiny import Registered

from eval import cells, harness


@pytest.fixture(autouse=True)
def _guesses():
    with Registered():
        yield


def ids(*overrides: str):
    """Ids of the first training and of the first attack on it."""
    first = harness.prepare(tiny(*overrides), device="cpu").trainings[0]
    return first.cell.id, first.watches[0].cell.id


def test_ids_are_short_and_stable():
    training, attack = ids()
    assert (training, attack) == ids()
    assert all(len(i) == 12 and int(i, 16) >= 0 for i in (training, attack))


@pytest.mark.parametrize(
    "override",
    [
        "method.fedavg.lr=0.2",
        "seeds=1",
        "defense=noise",
        "federation.rounds=3",
        "federation.partition.clients=4",
        "federation.engine=loop",
        "federation.augment=crop-flip",
        "task.dataset.seed=1",
        "task.model.normalize=true",
    ],
)
def test_what_training_depends_on_changes_both(override):
    assert not set(ids(override)) & set(ids())


@pytest.mark.parametrize(
    "override",
    [
        "attack.guess.spread=0.2",
        "observe.clients=1",
        "observe.batch_size=1",
        "observe.rounds=[1]",
        "observe.method={steps: 2}",
        "observe.augment=true",
        "threat.knows_labels=true",
        "score.lpips=auto",
    ],
)
def test_what_an_attack_depends_on_changes_the_attack_alone(override):
    training, attack = ids()
    assert ids(override)[0] == training
    assert ids(override)[1] != attack


def test_names_and_neighbours_change_nothing():
    calm = ("attack=guess", "observe.method={steps: 1}")
    assert ids(*calm, "title=Another") == ids(*calm)
    assert ids(*calm, "method=[{name: fedavg, lr: 0.1, batch_size: 6, as: mine}]") == ids(*calm)
    assert ids(*calm, "attack=[{name: guess, as: mine, against: fedavg}]") == ids(*calm)


def test_the_version_is_part_of_both(monkeypatch):
    before = ids()
    monkeypatch.setattr(cells, "version", lambda: "9.9")
    assert not set(ids()) & set(before)


def test_the_data_themselves_count(monkeypatch):
    before = ids()
    load = harness.prepare(tiny(), device="cpu").experiment.task.dataset.__class__.load

    def darker(self):
        found = load(self)
        found.train.inputs[0, 0, 0, 0] += 0.25
        return found

    monkeypatch.setattr(type(tiny().task.dataset), "load", darker)
    assert not set(ids()) & set(before)


def test_run_ids_follow_config_and_version(monkeypatch):
    first = cells.run_id(tiny())
    assert first == cells.run_id(tiny())
    assert first != cells.run_id(tiny("title=Another"))
    monkeypatch.setattr(cells, "version", lambda: "9.9")
    assert first != cells.run_id(tiny())
