"""What a cell is known by: everything its numbers depend on, and nothing else."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support import worlds
from support.runs import tiny
from support.tiny import Registered

from eval.run import cache_keys, runner
from eval.run.federation_data import dataset_digest
from fl.data.sources.embedded import Faces
from fl.data.sources.npz_files import Npz
from fl.methods.feddf import FedDF
from fl.methods.fedlaw import FedLAW


@pytest.fixture(autouse=True)
def _guesses():
    with Registered():
        yield


def ids(*overrides: str):
    """Ids of the first training and of the first attack on it."""
    first = runner.prepare(tiny(*overrides), device="cpu").trainings[0]
    return first.cell.id, first.attack_tasks[0].cell.id


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
        "federation.diagnostics=[loss]",
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


def test_names_and_neighbors_change_nothing():
    calm = ("attack=guess", "observe.method={steps: 1}")
    assert ids(*calm, "title=Another") == ids(*calm)
    assert ids(*calm, "method=[{name: fedavg, lr: 0.1, batch_size: 6, as: mine}]") == ids(*calm)
    assert ids(*calm, "attack=[{name: guess, as: mine, against: fedavg}]") == ids(*calm)


def test_the_order_of_measures_changes_nothing_and_none_is_taken_twice():
    assert ids("federation.diagnostics=[movement, loss]") == ids("federation.diagnostics=[loss, movement]")
    with pytest.raises(ValueError, match=r"federation\.diagnostics=.*: expected each once"):
        tiny("federation.diagnostics=[loss, loss]")


def test_the_version_is_part_of_both(monkeypatch):
    before = ids()
    monkeypatch.setattr(cache_keys, "version", lambda: "9.9")
    assert not set(ids()) & set(before)


def test_the_data_themselves_count(monkeypatch):
    before = ids()
    load = runner.prepare(tiny(), device="cpu").experiment.task.dataset.__class__.load

    def darker(self):
        found = load(self)
        found.train.inputs[0, 0, 0, 0] += 0.25
        return found

    monkeypatch.setattr(type(tiny().task.dataset), "load", darker)
    assert not set(ids()) & set(before)


def saved(path, level):
    """A data set of faces in a file, one pixel of which is at `level` of 255."""
    found = Faces(size=8).load()
    train, test = path / "train.npz", path / "test.npz"
    for file, part in ((train, found.train), (test, found.test)):
        pixels = (part.inputs * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy().copy()
        pixels[0, 0, 0, 0] = level
        np.savez(file, images=pixels, labels=part.labels.numpy())
    return f"{{name: npz, train: {train}, test: {test}}}", Npz(train=str(train), test=str(test))


def test_the_data_of_a_server_or_an_attacker_count_where_they_are_used(tmp_path):
    data, _ = saved(tmp_path, 1)
    one_step = "observe.method={steps: 1}"
    server = f"method=[{{name: feddf, public: {data}, server_steps: 1}}, {{name: fedavg, lr: 0.1, batch_size: 6}}]"
    attacker = f"attack=[{{name: first-step+lti, auxiliary: {data}}}, guess]"
    clients, learned, attacked = (ids(one_step, *more) for more in ((), (server,), (attacker,)))
    assert (learned, attacked) == (ids(one_step, server), ids(one_step, attacker))
    saved(tmp_path, 2)
    assert not set(ids(one_step, server)) & set(learned)
    assert ids(one_step, attacker)[0] == attacked[0] == clients[0]  # an attacker's images train nobody
    assert ids(one_step, attacker)[1] != attacked[1]
    (_, other) = runner.prepare(tiny(one_step, server), device="cpu").trainings
    (first, *_) = runner.prepare(tiny(one_step, attacker), device="cpu").trainings
    assert ids(one_step) == clients == (other.cell.id, first.attack_tasks[1].cell.id)  # nor do they concern the others


def test_cells_of_what_names_no_data_are_called_as_they_were():
    (first, *_) = runner.prepare(tiny(), device="cpu").trainings
    for cell in (first.cell, first.attack_tasks[0].cell):
        assert "public" not in cell.settings
        assert cache_keys.short_hash(cell.settings) == cell.id


def test_a_setting_that_came_later_renames_no_cell_where_it_is_off():
    before, clamped = ids("attack=rog"), ids("attack=[{name: rog, clamp_upsampled: true}]")
    assert ids("attack=[{name: rog, clamp_upsampled: false}]") == before != clamped
    (first, *_) = runner.prepare(tiny("attack=rog"), device="cpu").trainings
    spec = first.attack_tasks[0].cell.settings["attack"]
    assert not {"compiled", "clamped", "balance"} & set(spec)
    assert {"factor", "boxed"} <= set(spec)


@pytest.mark.parametrize("defense", ["[{name: noise, std: 0.1}]", "[{name: chain, parts: [clip, noise]}]"])
def test_a_search_under_noise_is_another_than_the_one_that_weighed_by_it(defense):
    (first, *_) = runner.prepare(tiny("attack=rog", f"defense={defense}"), device="cpu").trainings
    spec = first.attack_tasks[0].cell.settings["attack"]
    assert spec["balance"] == 0.0
    assert not {"compiled", "clamped"} & set(spec)


def test_a_server_reads_its_images_as_they_are_when_a_training_begins(tmp_path):
    seen = []
    for level in (1, 2):
        _, data = saved(tmp_path, level)
        for method in (FedDF(public=data), FedLAW(public=data)):
            worlds.federation(method, rounds=0)
            seen.append(round(float(method.public_images(worlds.task()).inputs[0, 0, 0, 0]) * 255))
    assert seen == [1, 1, 2, 2]


def test_names_of_classes_count(monkeypatch):
    before = ids()
    load = type(tiny().task.dataset).load
    monkeypatch.setattr(
        type(tiny().task.dataset), "load", lambda self: replace(load(self), class_names=("one", "other"))
    )
    assert not set(ids()) & set(before)


@pytest.mark.parametrize("kind", ["shape", "type"])
def test_what_the_same_bytes_stand_for_counts(kind):
    found = tiny().task.dataset.load()
    labels = found.test.labels
    # both read back as the same bytes
    test = replace(found.test, labels=labels.view(torch.float64) if kind == "type" else labels.reshape(-1, 1))
    assert dataset_digest(replace(found, test=test)) != dataset_digest(found)


def test_another_kind_of_device_is_another_cell():
    first = runner.prepare(tiny(), device="cpu").trainings[0]
    words = (first.federation, first.method.item, first.defense.item, first.seed)
    assert cache_keys.training_cell(first.data, *words).id == first.cell.id
    elsewhere = replace(first.data, device=torch.device("cuda"))
    assert cache_keys.training_cell(elsewhere, *words).id != first.cell.id


def test_labels_are_no_part_of_a_cell():
    assert ids('attack={name: guess, as: "guess@a-former-name=0.1"}') == ids("attack=guess")


def test_run_ids_follow_config_and_version(monkeypatch):
    first = cache_keys.run_id(tiny())
    assert first == cache_keys.run_id(tiny())
    assert first != cache_keys.run_id(tiny("title=Another"))
    monkeypatch.setattr(cache_keys, "version", lambda: "9.9")
    assert first != cache_keys.run_id(tiny())


def test_cells_from_before_optimizers_could_be_chosen_keep_their_ids():
    plain = ids()
    assert ids("method.fedavg.optimizer=sgd") == plain
    assert ids("method.fedavg.optimizer=adam")[0] != plain[0]
    assert ids("threat.knows_optimizer=true") == plain
    assert ids("threat.knows_optimizer=false")[1] != plain[1]
    assert "optimizer" not in cache_keys._without_optimizer({"name": "fedavg", "optimizer": "sgd"})
    chosen = {"name": "hfedf", "optimizer": "sgd"}
    assert cache_keys._without_optimizer(chosen) == chosen


def test_a_network_of_ones_own_is_known_by_its_source(tmp_path, monkeypatch):
    source = """
from torch import nn

def build(num_classes, input_shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[1] * input_shape[2], num_classes))
"""
    monkeypatch.chdir(tmp_path)
    found = []
    for name, text in (("own_a", source), ("own_b", source), ("own_c", source + "# changed")):
        (tmp_path / f"{name}.py").write_text(text)
        first = runner.prepare(tiny(f"task.model={name}:build"), device="cpu").trainings[0]
        found.append(first.cell.settings["network"])
        assert first.cell.settings["task"]["model"]["input_shape"] == list(first.data.dataset.input_shape)
        again = runner.prepare(tiny(f"task.model={name}:build"), device="cpu").trainings[0]
        assert again.cell.id == first.cell.id
    assert len({*found}) == 3
