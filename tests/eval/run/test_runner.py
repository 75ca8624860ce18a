"""Runs from end to end on a tiny experiment: rows, rounds, pictures and what they depend on."""

import json
import multiprocessing
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch
from support.runs import run, tiny
from support.tiny import Guess, Registered

from attacks import parallel as spread
from attacks.base import NotApplicable
from attacks.search_control import SearchControl
from eval.experiment.spec import Entry
from eval.io.jsonl import read_rows
from eval.report import results_table
from eval.report.formatting import FURTHER_ACCURACIES
from eval.report.writer import write_report
from eval.run import attack_cell, federation_data, runner
from eval.run import training_cell as training
from eval.run.run_directory import RunDir
from fl.defense import Defense
from fl.simulation.protocol import OPTIONAL_SCORES
from fl.tensors import dense


@pytest.fixture(autouse=True)
def _guesses():
    with Registered():
        yield


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The tiny experiment, run once: its folder and rows."""
    folder = tmp_path_factory.mktemp("harness") / "out"
    with Registered():
        return folder, run(tiny(), folder)


@pytest.fixture
def rows(done):
    return done[1]


def test_rows_have_a_score_for_each_image_and_attack(rows):
    guesses = [row for row in rows if row["attack"] == "guess"]
    assert len(guesses) == 2 * 4
    assert {row["method"] for row in guesses} == {"fedavg", "hyperfl"}
    for row in guesses:
        assert 5 < row["psnr"] < 30
        assert 0 <= row["accuracy"] <= 1
        assert row["forward_error"] < 1e-6
        assert row["floor_nearest_psnr"] > 0
    of_fedavg, of_hyperfl = ([r["picture"] for r in guesses if r["method"] == m] for m in ("fedavg", "hyperfl"))
    assert of_fedavg == of_hyperfl  # the same images under every method
    assert len(set(of_fedavg)) == 4
    refused = [row for row in rows if row["attack"] == "refuse"]
    assert [row["not_applicable"] for row in refused] == ["not in the mood"] * 2
    json.dumps(rows, allow_nan=False)


def test_rounds_and_accuracies(done):
    folder, rows = done
    rounds = read_rows(folder / "rounds.jsonl")
    assert [(row["method"], row["round"]) for row in rounds] == [
        (m, r) for m in ("fedavg", "hyperfl") for r in (0, 1, 2)
    ]
    for row in rounds:
        assert row["accuracy"] == pytest.approx(sum(row["accuracies"]) / 3)
        assert (row["accuracy_local"] is None) == (row["round"] == 0)
        assert row["clients"] == ([0, 1, 2] if row["round"] else [])
        assert row["numbers_down"] > 0
    for method in ("fedavg", "hyperfl"):
        own = [row for row in rounds if row["method"] == method]
        best = max(own, key=lambda row: row["accuracy"])
        (row, *_) = (row for row in rows if row["method"] == method)
        assert row["accuracy"] == row["accuracy_last"] == own[-1]["accuracy"]
        assert row["accuracy_local"] == row["accuracy_local_last"] == own[-1]["accuracy_local"]
        assert (row["accuracy_best"], row["accuracy_best_round"]) == (best["accuracy"], best["round"])


def test_accuracies_are_those_of_the_rows_own_round(tmp_path):
    words = ("federation.rounds=3", "federation.evaluate_every=3", "observe.rounds=[0, 1, 3]", "attack=guess")
    rows = [row for row in run(tiny(*words), tmp_path / "a") if row["method"] == "fedavg"]
    rounds = {row["round"]: row for row in read_rows(tmp_path / "a" / "rounds.jsonl") if row["method"] == "fedavg"}
    assert {row["round"] for row in rows} == {0, 1, 3}
    for row in rows:
        own = rounds[row["round"]]
        assert (row["accuracy"], row["accuracy_local"]) == (own["accuracy"], own["accuracy_local"])
        assert (row["accuracy"] is None) == (row["round"] == 1)  # not evaluated
        assert row["accuracy_last"] == rounds[3]["accuracy"]
        assert row["accuracy_local_last"] == rounds[3]["accuracy_local"]


def test_further_scores_reach_rows_and_report(tmp_path):
    words = (
        "federation.held_out_clients=1",
        "federation.fine_tune_epochs=2",
        "federation.global_test=true",
        "attack=guess",
    )
    rows = [row for row in run(tiny(*words), tmp_path / "a") if row["method"] == "fedavg"]
    rounds = [row for row in read_rows(tmp_path / "a" / "rounds.jsonl") if row["method"] == "fedavg"]
    counts = {"tuned": 2, "unseen": 1, "unseen_tuned": 1, "global": 2}
    assert set(counts) == set(OPTIONAL_SCORES) == set(FURTHER_ACCURACIES)
    assert len(rounds[-1]["accuracies"]) == 2
    for name, count in counts.items():
        values = rounds[-1]["accuracies_further"][name]
        assert len(values) == count
        assert rows[0][f"accuracy_{name}_last"] == rounds[-1][f"accuracy_{name}"] == pytest.approx(sum(values) / count)
    for name in ("accuracy_local", *(f"accuracy_{name}" for name in OPTIONAL_SCORES)):
        course = [(row[name], -row["round"]) for row in rounds if row[name] is not None]
        assert (rows[0][f"{name}_best"], -rows[0][f"{name}_best_round"]) == max(course)  # the first of equals
    write_report(tmp_path / "a")
    text = (tmp_path / "a" / "report.md").read_text()
    best = f"{rows[0]['accuracy_best']:.1%} ({rows[0]['accuracy_best_round']})".replace("%", "\N{NO-BREAK SPACE}%")
    assert best in text.split("### Accuracy in the best round")[1].split("###")[0]
    for name in OPTIONAL_SCORES:
        assert FURTHER_ACCURACIES[name] in text
        assert f"{rows[0][f'accuracy_{name}_last']:.1%}".replace("%", "\N{NO-BREAK SPACE}%") in text


def test_options_of_the_federation_take_effect(tmp_path):
    partial = ("federation.client_fraction=0.34", "federation.rounds=3", "federation.evaluate_every=2", "attack=guess")
    run(tiny(*partial), tmp_path / "a")
    rounds = [row for row in read_rows(tmp_path / "a" / "rounds.jsonl") if row["method"] == "fedavg"]
    assert [len(row["clients"]) for row in rounds] == [0, 1, 1, 3]
    assert [row["accuracy"] is None for row in rounds] == [False, True, False, False]
    run(tiny(*partial, "federation.full_last_round=false", "federation.augment=crop-flip"), tmp_path / "b")
    changed = [row for row in read_rows(tmp_path / "b" / "rounds.jsonl") if row["method"] == "fedavg"]
    assert [len(row["clients"]) for row in changed] == [0, 1, 1, 1]


def test_augmentation_in_the_observed_round(tmp_path):
    changed = ("federation.augment=crop-flip", "observe.augment=true", "attack=guess")
    rows = run(tiny(*changed), tmp_path / "a")
    plain = run(tiny(*changed[:1], *changed[2:]), tmp_path / "b")
    assert [row["update"] for row in rows] == [row["update"] for row in plain]
    assert [row["floor_mean_mse"] for row in rows] != [row["floor_mean_mse"] for row in plain]  # others were fed
    assert max(row["forward_error"] for row in rows) < 1e-6


@dataclass(frozen=True, kw_only=True)
class NoisySteps(Defense):
    """Noise on every gradient."""

    name: ClassVar[str] = "noisy-steps"

    def gradient(self, grad, params, batch, generator):
        found = grad(params, batch)
        if generator is None:
            return found
        return {n: dense(v) + torch.randn(v.shape, generator=generator) for n, v in found.items()}


def test_fresh_noise_is_no_fault_of_the_attackers_model(tmp_path):
    base = tiny("defense=[noise, prune]", "attack=guess")
    rows = run(base, tmp_path / "a")
    for defense in ("noise", "prune"):
        assert max(row["forward_error"] for row in rows if row["defense"] == defense) < 1e-5


def test_a_defense_made_in_python_can_be_run(tmp_path):
    steps = Entry(label="noisy-steps", item=NoisySteps())
    plan = runner.prepare(replace(tiny("attack=guess"), defense=(steps,)), device="cpu")
    assert len({cell.id for _, cell in plan.cells()}) == 4


def test_an_unknown_deterministic_defense_is_a_mismatch(tmp_path):
    rows = run(tiny("defense=prune", "threat.knows_defense=false"), tmp_path / "a")
    assert min(row["forward_error"] for row in rows if "forward_error" in row) > 0.01


def test_pictures_are_the_images_named_in_the_rows(done):
    folder, rows = done
    (world, *_) = {training.data for training in runner.prepare(tiny(), device="cpu").trainings}
    rows = [row for row in rows if row["attack"] == "guess" and row["method"] == "fedavg"]
    path = folder / "images" / "fedavg-none-guess-round2-seed0.npz"
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    with np.load(path, allow_pickle=False) as arrays:
        originals, guesses = (torch.from_numpy(arrays[key]) for key in ("original", "reconstruction"))
    for row, original, guess in zip(rows, originals, guesses, strict=True):
        index = int(row["picture"].partition(":")[2])
        assert torch.equal(original, world.dataset.train.inputs[index])
        assert float((original - guess).square().mean()) == pytest.approx(row["mse"], rel=1e-5)


def victims(*overrides: str):
    plan = runner.prepare(tiny(*overrides), device="cpu")
    return plan.trainings[0].data, plan.trainings[0].attack_tasks[0].observation_spec.targets


def test_victims_hold_the_classes_asked_for():
    world, found = victims("observe.classes=face", "observe.clients=[0, 2]")
    assert [victim.client for victim in found] == [0, 0, 2, 2]
    assert all((victim.data.labels == 0).all() and len(victim.data) == 2 for victim in found)
    for victim in found:
        assert torch.isin(victim.samples, world.partition.train[victim.client]).all()


def test_a_guess_from_other_images_has_none_of_the_watched_clients():
    world, found = victims("observe.clients=[0, 2]")
    known = world.reference(found)
    own = torch.cat([world.partition.train[client] for client in (0, 2)])
    assert len(known) == len(world.dataset.train) - len(own) > 0
    held = world.dataset.train.inputs[own].flatten(1)
    assert (torch.cdist(known.inputs.flatten(1), held) > 0).all()


def test_every_victim_is_observed_with_draws_of_its_own(monkeypatch):
    one = runner.prepare(tiny("observe.batch_size=1", "attack=guess"), device="cpu").trainings[0]
    seeds, observe = [], attack_cell.observe

    def noted(start, **settings):
        seeds.append(start.key.seed)
        return observe(start, **settings)

    monkeypatch.setattr(attack_cell, "observe", noted)
    with training.federation_of(one) as federation:
        attack_cell.observe_targets(federation, one, one.attack_tasks[0].observation_spec)
    assert len(seeds) == len(set(seeds)) == 4


def test_a_whole_client_is_watched_where_no_number_is_stated():
    world, (victim,) = victims("observe.images=null", "observe.batch_size=null")
    assert sorted(victim.samples.tolist()) == world.partition.train[0].tolist()


def test_seeds_start_anew_on_the_same_images(tmp_path):
    rows = run(tiny("seeds=[0, 1]", "attack=guess"), tmp_path / "a")
    first, second = ([row for row in rows if row["seed"] == seed] for seed in (0, 1))
    assert [row["picture"] for row in first] == [row["picture"] for row in second]
    assert [row["psnr"] for row in first] != [row["psnr"] for row in second]


def test_rounds_are_watched_when_asked(tmp_path):
    seen: list[tuple[str, int, int]] = []
    rows = run(
        tiny("observe.rounds=[0, 1]", "attack=guess"), tmp_path / "a", progress=lambda *event: seen.append(event)
    )
    assert sorted({row["round"] for row in rows}) == [0, 1]
    assert ("fedavg: training", 2, 2) in seen
    assert ("fedavg: guess (round 0)", 0, 2) in seen
    assert ("fedavg: guess (round 1)", 2, 2) in seen


def test_clients_of_bounded_participation_are_watched_before_their_last_update():
    spent = "method=[{name: dp-fedavg, rounds: 2, mode: as-published, epochs: 1}]"
    settings = ("attack=guess", "observe.method={}", spent)
    (training,) = runner.prepare(tiny(*settings, "federation.rounds=2"), device="cpu").trainings
    assert [watch.round for watch in training.attack_tasks] == [1]
    with pytest.raises(ValueError, match=r"at most 1 for 'dp-fedavg', whose clients send nothing after 2 rounds"):
        runner.prepare(tiny(*settings, "federation.rounds=2", "observe.rounds=[0, 2]"), device="cpu")


def test_method_without_attack_keeps_its_accuracy(tmp_path):
    experiment = tiny("attack=[{name: guess, against: hyperfl}]")
    rows = run(experiment, tmp_path / "a")
    (row,) = (row for row in rows if row["method"] == "fedavg")
    assert 0 <= row["accuracy"] <= 1
    assert any("no attack" in line[-1] for line in results_table.build_table(rows, experiment).rows)


def test_a_grid_is_run_entry_by_entry(tmp_path):
    sweep = {"attack.guess.spread": [0.0, 0.5], "federation.rounds": [0, 1], "observe.batch_size": [1, 4]}
    experiment = tiny(sweep=sweep)
    rows = run(experiment, tmp_path / "a")
    guesses = {(row["method"], row["attack"], row["round"], row["images"]) for row in rows if "images" in row}
    methods = [(f"{name}@rounds={number}", number) for name in ("fedavg", "hyperfl") for number in (0, 1)]
    assert guesses == {
        (method, f"guess@spread={spread}@batch_size={size}", number, size)
        for method, number in methods
        for spread in ("0", "0.5")
        for size in (1, 4)
    }


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("task.model.input_shape=[1, 28, 28]", r"expected input_shape \[1, 8, 8\]"),
        ("observe.images=14", "expected at most the 12 training images of client 0, got 14"),
        ("observe.clients=3", "expected numbers below 3, got 3"),
        ("observe.classes=fase", "did you mean 'face'"),
        ("observe.classes=2", r"labels in \[0, 2\), got 2"),
        ("federation.partition.train_size=400", "expected 1 to"),
    ],
)
def test_what_does_not_fit_is_refused_before_training(override, said):
    with pytest.raises(ValueError, match=said):
        runner.prepare(tiny(override), device="cpu")


def test_missing_data_set_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setenv("HYPERLEAK_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="HYPERLEAK_DATA"):
        runner.prepare(tiny("task.dataset=cifar10"), device="cpu")


def test_devices_are_resolved_and_others_refused():
    assert federation_data.resolve_device("cpu").type == "cpu"
    assert federation_data.resolve_device("auto").type in {"cpu", "cuda"}
    with pytest.raises(ValueError, match="expected device auto, cpu or cuda, got 'gpu'"):
        federation_data.resolve_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="use --device cpu"):
            federation_data.resolve_device("cuda")


def test_a_gpu_computes_convolutions_in_single_precision(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, left in (("cpu", True), ("auto", False), ("cuda:1", False)):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
        federation_data.resolve_device(name)
        assert torch.backends.cudnn.allow_tf32 is left


def test_what_a_code_could_show_at_best_is_said(tmp_path):
    attacks = "attack=[{name: rog, iterations: 30, factor: 2, against: fedavg}, {name: guess, against: fedavg}]"
    rows = run(tiny(attacks, "observe.images=2"), tmp_path / "a")
    bounded = [row for row in rows if row["attack"] == "rog"]
    assert all(row["psnr"] < row["bound_psnr"] < 60 for row in bounded)
    assert not any("bound_psnr" in row for row in rows if row["attack"] != "rog")
    write_report(tmp_path / "a")
    assert "closest code (dB)" in (tmp_path / "a" / "report.md").read_text()


def test_rows_say_whether_an_image_is_named_among_others_of_its_class(done):
    _, rows = done
    guesses = [row for row in rows if row["attack"] == "guess"]
    assert all(isinstance(row["identified"], bool) and 2 <= row["identified_among"] <= 50 for row in guesses)
    assert all(row["candidates"] == row["images"] for row in guesses)
    for row in guesses:
        for way in ("identified_by_features", "identified_by_update"):
            assert isinstance(row[way], bool) or row["missing"][way]
    assert all((row["identified_by_update"] is None) == (row["method"] == "hyperfl") for row in guesses)


@pytest.mark.parametrize("keep", [True, False])
def test_an_attacker_may_have_seen_the_same_client_before(tmp_path, monkeypatch, keep):
    seen = {}

    def attack_view(self, view, seed):
        seen.setdefault(view.round, []).append(view)
        return NotApplicable("only looking")

    monkeypatch.setattr(Guess, "attack_view", attack_view)
    words = (
        "threat.history_rounds=2",
        "federation.rounds=3",
        "observe.rounds=[0, 1, 3]",
        "attack=guess",
        "observe.images=2",
    )
    experiment = tiny(*words, "observe.method={}", "method=[{name: fedavg, lr: 0.1, batch_size: 6}]")
    run(experiment, tmp_path / "a", keep_checkpoints=keep)
    for number, past in ((0, []), (1, [0]), (3, [1, 2])):
        (view,) = seen[number]
        assert [earlier.round for earlier in view.history] == past
        assert not any(earlier.history for earlier in view.history)
        for earlier in view.history:
            if earlier.round in seen:
                (alone,) = seen[earlier.round]
                assert all(torch.equal(dense(v), dense(earlier.update[n])) for n, v in alone.update.items())
                assert all(torch.equal(dense(v), dense(earlier.shared[n])) for n, v in alone.shared.items())


def test_attacks_spread_over_processes_leave_the_same_rows(done, tmp_path, monkeypatch):
    here, run_here = [], spread._run_here

    def slowly(attack, views, seeds, control):
        here.extend(seeds)
        time.sleep(0.5)
        return run_here(attack, views, seeds, control)

    def at_once(workers):
        made = spread.AttackPool(workers, patience=0.0)
        if workers > 1:
            made._ready_pool().result()
        return made

    monkeypatch.setattr(spread, "_run_here", slowly)
    monkeypatch.setattr(runner, "AttackPool", at_once)
    folder, counts = tmp_path / "out", []
    told = partial(run, tiny(), folder, progress=lambda stage, done, _: counts.append((stage, done)), workers=2)
    assert told() == done[1]
    assert 0 < len(here) < 6  # of three attacks on two updates
    assert (folder / "images.jsonl").read_bytes() == (done[0] / "images.jsonl").read_bytes()
    assert ("fedavg: guess", 2) in counts
    assert not multiprocessing.active_children()


def test_how_far_a_run_is_gets_written_for_a_small_share_of_the_time(monkeypatch, tmp_path):
    """Of thousands of cells that takes a second, which after each of them would come to hours."""
    now, written = [0.0], []

    def write(self, status):
        written.append(now[0])
        now[0] += 1.0

    monkeypatch.setattr(runner.Run, "write_status", write)
    monkeypatch.setattr(runner.time, "monotonic", lambda: now[0])
    made = runner.Run(runner.prepare(tiny(), device="cpu"), RunDir(tmp_path), runner.Options(), runner.silent, None)
    for _ in range(1000):
        made.write_progress()
        now[0] += 0.1
    assert len(written) == 6
    assert np.diff(written) == pytest.approx(runner.SHARE_OF_TIME, abs=0.2)


def test_only_where_time_is_limited_are_open_cells_counted(monkeypatch, tmp_path):
    made = runner.Run(runner.prepare(tiny(), device="cpu"), RunDir(tmp_path), runner.Options(), runner.silent, None)
    assert made.share_of_time("x").seconds_left == float("inf")
    assert made.open_searches() == []
    made.options = runner.Options(control=SearchControl(time_limit=60))
    assert {cell.id for cell in made.open_searches()} >= {one.cell.id for one in made.plan.trainings}
