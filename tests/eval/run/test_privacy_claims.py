"""What a run records of the privacy its methods claim, and how often it says that images can be named at most."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import reconstruction_robustness as reference
from support.runs import run, tiny, unstated
from support.tiny import Registered

from eval.experiment.spec import Experiment
from eval.io.jsonl import read_rows
from eval.privacy import claim_rows, reconstruction_robustness
from eval.run import privacy_claims, results, runner
from eval.run.privacy_claims import BOUND, EPSILON, OF_UPDATE
from eval.run.run_directory import RunDir
from fl.data.partitions.partition import Partition, Partitioner
from fl.methods.dp_fedavg import DPFedAvg
from fl.privacy.accounting import Charge, compute_epsilon

SETTINGS = "noise_multiplier: 1.0, images: 12, batch_size: 6, epochs: 1, clip: 1.0"
METHODS = f"""method=[
  {{name: fedavg, lr: 0.1, batch_size: 6}},
  {{name: dp-fedavg, rounds: 3, {SETTINGS}}},
  {{name: centaur, rounds: 3, mode: as-published, {SETTINGS}}},
  {{name: dp-fedavg, as: clients, rounds: 3, mode: client-level, {SETTINGS}}}]"""
TRAINED, SEEN = Charge(1.0, 0.5, 4), Charge(1.0, 1.0, 1)
"""Two rounds of two steps at half the images; one step on all that is watched."""


@pytest.fixture(autouse=True)
def _guesses():
    with Registered():
        yield


def private(*words: str, rounds: int = 3) -> Experiment:
    """One private method."""
    method = f"method=[{{name: dp-fedavg, rounds: {rounds}, {SETTINGS}}}]"
    return tiny("attack=guess", "observe.method={steps: 1}", method, *words)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run of four methods: folder and rows."""
    folder = tmp_path_factory.mktemp("claims") / "out"
    with Registered():
        return folder, run(tiny("attack=guess", "observe.method={steps: 1}", METHODS), folder)


def test_every_private_training_says_what_it_may_claim(done):
    rows = {row["method"]: row for row in read_rows(done[0] / "privacy.jsonl")}
    assert list(rows) == ["dp-fedavg", "centaur", "clients"]  # fedavg claims nothing
    said = rows["dp-fedavg"]
    assert said["epsilon"] == compute_epsilon([TRAINED], 1e-5)
    assert said["epsilon_rdp"] == compute_epsilon([TRAINED], 1e-5, "rdp")
    expected = {"unit": "record", "mode": "dp-joint", "rate": 0.5, "noise_multiplier": 1.0, "clip": 1.0, "steps": 4}
    assert {key: said[key] for key in expected} == expected
    assert (said["rounds"], said["missing"], said["audit"]["steps"]) == (2, {}, 4)
    assert 0 <= said["audit"]["lower"] < said["audit"]["claimed"] == said["epsilon"] < said["audit"]["ceiling"]
    assert rows["centaur"]["epsilon"] is rows["centaur"]["audit"] is None
    assert "without noise" in rows["centaur"]["reason"]
    assert rows["centaur"]["missing"]["audit"]
    assert (rows["clients"]["unit"], rows["clients"]["missing"]) == ("client", {})
    assert 0 <= rows["clients"]["audit"]["lower"] < rows["clients"]["audit"]["claimed"] == rows["clients"]["epsilon"]
    assert rows["clients"]["audit"]["steps"] == 2  # rounds
    assert claim_rows.statement_of_row(said).sentence().startswith("record-level (")


def test_images_are_bounded_by_everything_that_was_seen_of_them(done):
    rows = [row for row in done[1] if row["method"] == "dp-fedavg"]
    assert len(rows) == 4
    for row in rows:
        chance = 1 / row["identified_among"]
        assert row[OF_UPDATE] == reference.full_batch_bound(chance, 1.0)
        assert row[BOUND] == reconstruction_robustness.bound_from_charges(chance, (TRAINED, SEEN))
        assert chance < row[OF_UPDATE] < row[BOUND] < 1
        assert row[EPSILON] == compute_epsilon([TRAINED, SEEN], 1e-5)


def test_what_has_no_bound_says_why(done):
    by_method = {m: [r for r in done[1] if r["method"] == m] for m in ("fedavg", "centaur", "clients")}
    assert all(BOUND not in row for row in by_method["fedavg"])
    for method, words in (("centaur", "without noise"), ("clients", "not against the server")):
        for row in by_method[method]:
            assert row[BOUND] is None
            assert words in row["missing"][BOUND]
            assert OF_UPDATE not in row


def test_the_claim_lies_in_the_training_s_cell_and_older_cells_do_without_its_audit(done):
    plan = runner.prepare(tiny("attack=guess", "observe.method={steps: 1}", METHODS), device="cpu")
    folder = RunDir(done[0])
    files = {t.method.label: folder.file(t.cell, privacy_claims.CLAIM) for t in plan.trainings}
    assert files["fedavg"].read_text() == "null\n"
    before = (done[0] / "privacy.jsonl").read_bytes()
    results.assemble(plan, folder)
    assert (done[0] / "privacy.jsonl").read_bytes() == before
    kept = files["dp-fedavg"].read_text()
    unstated(files["dp-fedavg"].parent)
    files["dp-fedavg"].unlink()
    results.assemble(plan, folder)
    old, new = (json.loads(text.splitlines()[0]) for text in ((done[0] / "privacy.jsonl").read_text(), before.decode()))
    assert old.pop("audit") is None
    assert "older" in old.pop("missing")["audit"]
    assert old == {key: value for key, value in new.items() if key not in {"audit", "missing"}}
    files["dp-fedavg"].write_text(kept)


def test_a_run_without_private_methods_has_no_such_file(tmp_path):
    run(tiny("attack=guess"), tmp_path / "a")
    assert not (tmp_path / "a" / "privacy.jsonl").exists()


def test_clients_are_charged_for_the_rounds_they_took_part_in(tmp_path):
    words = (
        "federation.client_fraction=0.34",
        "federation.rounds=4",
        "federation.full_last_round=false",
        "observe.rounds=[0, 4]",
    )
    rows = run(private(*words, rounds=5), tmp_path / "a")
    rounds = read_rows(tmp_path / "a" / "rounds.jsonl")
    taken = privacy_claims.participations(rounds)
    assert 1 <= max(taken.values()) <= 4 == sum(taken.values())
    (said,) = read_rows(tmp_path / "a" / "privacy.jsonl")
    assert said["epsilon"] == compute_epsilon([replace(TRAINED, steps=2 * max(taken.values()))], 1e-5)
    assert said["rounds"] == max(taken.values())
    for row in rows:
        before = replace(TRAINED, steps=2 * privacy_claims.participations(rounds, row["round"])[0])
        assert row[EPSILON] == compute_epsilon([before, SEEN], 1e-5)
    assert all(row[BOUND] == row[OF_UPDATE] for row in rows if row["round"] == 0)


def test_clients_without_budget_are_neither_charged_nor_attacked(tmp_path):
    sampled = "federation.client_fraction=0.99"  # all three; but a run that samples can't tell beforehand who is left
    rows = run(private(sampled, "federation.rounds=3", "observe.rounds=[1, 3]", rounds=2), tmp_path / "a")
    rounds = read_rows(tmp_path / "a" / "rounds.jsonl")
    assert [row["clients"] for row in rounds] == [[], [0, 1, 2], [0, 1, 2], []]
    assert rounds[-1]["numbers_up"] == 0
    (said,) = read_rows(tmp_path / "a" / "privacy.jsonl")
    assert (said["rounds"], said["steps"], said["epsilon"]) == (2, 4, compute_epsilon([TRAINED], 1e-5))
    early, late = ([row for row in rows if row["round"] == number] for number in (1, 3))
    assert all(row[EPSILON] < compute_epsilon([TRAINED, SEEN], 1e-5) for row in early)
    assert len(late) == 2  # one for each update
    assert all("client 0 has spent its privacy budget on 2 rounds" in row["not_applicable"] for row in late)
    assert all(BOUND not in row and "psnr" not in row for row in late)


DEFENDED = "defense={name: dp-sgd, clip: 1.0, noise_multiplier: 1.0}"


def test_the_defense_s_noise_is_accounted_for_too(tmp_path):
    rows = run(tiny("attack=guess", "observe.method={steps: 1, head_epochs: 0}", DEFENDED), tmp_path / "a")
    said = {row["method"]: row for row in read_rows(tmp_path / "a" / "privacy.jsonl")}
    assert {name: (row["steps"], row["rate"]) for name, row in said.items()} == {
        "fedavg": (2, 1.0),  # two rounds of one epoch
        "hyperfl": (4, 1.0),  # and of one for the classifier
    }
    for row in said.values():
        assert (row["unit"], row["adjacency"], row["defense"], row["missing"]) == ("record", "zero-out", "dp-sgd", {})
        assert row["epsilon"] == compute_epsilon([Charge(1.0, 1.0, row["steps"])], 1e-5) < row["epsilon_rdp"]
        assert row["audit"]["steps"] == row["steps"]
        assert row["audit"]["lower"] < row["audit"]["claimed"] == row["epsilon"]
    (one, *_) = [row for row in rows if row["method"] == "fedavg" and row["attack"] == "guess"]
    assert one[BOUND] == reconstruction_robustness.bound_from_charges(
        1 / one["identified_among"], (Charge(1.0, 1.0, 3),)
    )


def test_who_knows_the_steps_gains_what_sampling_hides_from_others() -> None:
    words = ("observe={images: 4, batch_size: 4, method: {batch_size: 2, steps: 2}}",)
    for schedule, charge in ((False, Charge(1.0, 2 / 12, 2)), (True, Charge(1.0, 1.0, 2))):
        (training,) = runner.prepare(private(*words, f"threat.knows_schedule={schedule}"), device="cpu").trainings
        (watch,) = training.attack_tasks
        row = {"update": watch.observation_spec.targets[0].key, "identified_among": 5}
        (found,) = privacy_claims.IdentificationBounds(training, []).of(watch, [row])
        assert found[OF_UPDATE] == reconstruction_robustness.bound_from_charges(0.2, (charge,))


def test_no_bound_against_who_knows_the_noise() -> None:
    (training,) = runner.prepare(private("threat.knows_randomness=true"), device="cpu").trainings
    (watch,) = training.attack_tasks
    row = {"update": watch.observation_spec.targets[0].key, "identified_among": 5}
    (found,) = privacy_claims.IdentificationBounds(training, []).of(watch, [row])
    assert found[BOUND] is None
    assert "knows the noise" in found["missing"][BOUND]


@pytest.mark.parametrize(("number", "bounded"), [(0, True), (1, False)])
def test_no_bound_on_new_images_once_their_candidates_were_trained_on(number: int, bounded: bool) -> None:
    words = (f"observe={{images: 2, split: test, rounds: [{number}]}}", "federation.rounds=1")
    (training,) = runner.prepare(private(*words), device="cpu").trainings
    (watch,) = training.attack_tasks
    row = {"update": watch.observation_spec.targets[0].key, "identified_among": 5}
    (found,) = privacy_claims.IdentificationBounds(training, []).of(watch, [row])
    assert (found[BOUND] is not None) is bounded
    assert bounded or "may tell them apart" in found["missing"][BOUND]


def test_rounds_seen_before_are_charged_too(tmp_path):
    rows = run(private("threat.history_rounds=1"), tmp_path / "a")
    for row in rows:
        assert row[OF_UPDATE] == reference.full_batch_bound(1 / row["identified_among"], 1.0, 2)


@pytest.mark.parametrize(
    ("kind", "words"), [("overlap", "6 images are held by several clients"), ("domains", "told apart by their style")]
)
def test_no_bound_where_candidates_are_no_match(kind: str, words: str, tmp_path: Path) -> None:
    plan = runner.prepare(private(), device="cpu")
    (training,) = plan.trainings
    if kind == "overlap":
        held = training.data.partition
        both = (held.train[0], torch.cat([held.train[1], held.train[0][:6]]), held.train[2])
        training = replace(training, data=replace(training.data, partition=Partition(both, held.test)))
    else:

        class Domains(Partitioner):
            name = "domains"

        training = replace(training, federation=replace(training.federation, partition=Domains()))
    (watch,) = training.attack_tasks
    row = {"update": watch.observation_spec.targets[0].key, "identified_among": 5, "missing": {"ssim": "small"}}
    (found,) = privacy_claims.IdentificationBounds(training, []).of(watch, [row])
    assert found[BOUND] is None
    assert words in found["missing"][BOUND]
    assert found["missing"]["ssim"] == "small"


def test_an_infinite_epsilon_is_none_with_a_reason() -> None:
    said = DPFedAvg(noise_multiplier=1.0).privacy([600], 1)
    assert said is not None
    row: dict[str, Any] = privacy_claims._plain(replace(said, epsilon=math.inf, epsilon_rdp=math.inf))
    assert row["epsilon"] is row["epsilon_rdp"] is None
    assert "no finite epsilon" in claim_rows.statement_of_row(row).sentence()
    row = privacy_claims._plain(replace(said, epsilon_rdp=math.inf))
    assert "record-level" in claim_rows.statement_of_row(row).sentence()
    assert "RDP" not in claim_rows.statement_of_row(row).sentence()


def test_under_secure_aggregation_the_member_who_is_charged_most_counts() -> None:
    (training,) = runner.prepare(private("defense={name: secagg, group_size: 2}"), device="cpu").trainings
    (watch,) = training.attack_tasks
    rounds = [{"round": 1, "clients": [1]}, {"round": 2, "clients": [0, 1]}]  # client 0 is watched with client 1
    row = {"update": watch.observation_spec.targets[0].key, "identified_among": 5}
    (found,) = privacy_claims.IdentificationBounds(training, rounds).of(watch, [row])
    assert (
        found[BOUND]
        == reconstruction_robustness.bound_from_charges(0.2, (TRAINED, SEEN))
        > reconstruction_robustness.bound_from_charges(0.2, (SEEN,))
    )
