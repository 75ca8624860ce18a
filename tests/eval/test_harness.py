import json
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from support.tiny import CONFIG, Registered

from eval import config, harness, results, tables, yamlfile
from eval.experiment import Entry
from eval.store import read_rows
from fl.defense import Defense
from fl.tensors import dense


@pytest.fixture(autouse=True)
def _guesses():
    with Registered():
        yield


def tiny(*overrides: str):
    found = config.read(yamlfile.parse(CONFIG))
    for text in overrides:
        found = config.override(found, text)
    return found


def save(out, experiment):
    outcome = harness.run(harness.prepare(experiment, device="cpu"))
    table = tables.markdown(tables.table(outcome.rows, experiment))
    results.write(out, experiment, outcome, device="cpu", table=table)
    return outcome


@pytest.fixture
def outcome():
    return harness.run(harness.prepare(tiny(), device="cpu"))


def test_rows(outcome):
    guesses = [row for row in outcome.rows if row["attack"] == "guess"]
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
    refused = [row for row in outcome.rows if row["attack"] == "refuse"]
    assert [row["not_applicable"] for row in refused] == ["not in the mood"] * 2
    json.dumps(outcome.rows, allow_nan=False)


@dataclass(frozen=True, kw_only=True)
class NoisySteps(Defense):
    """Noise on every gradient."""

    name: ClassVar[str] = "noisy-steps"

    def gradient(self, grad, params, batch, generator):
        found = grad(params, batch)
        if generator is None:
            return found
        return {n: dense(v) + torch.randn(v.shape, generator=generator) for n, v in found.items()}


def test_fresh_noise_is_no_fault_of_the_attackers_model():
    base = tiny("defense=[noise, prune]", "attack=guess")
    steps = Entry(label="noisy-steps", item=NoisySteps())
    experiment = replace(base, defense=(*base.defense, steps))
    rows = harness.run(harness.prepare(experiment, device="cpu")).rows
    for defense in ("noise", "prune", "noisy-steps"):
        assert max(row["forward_error"] for row in rows if row["defense"] == defense) < 1e-5


def test_an_unknown_deterministic_defence_is_a_mismatch():
    rows = harness.run(harness.prepare(tiny("defense=prune", "threat.knows_defense=false"), device="cpu")).rows
    assert min(row["forward_error"] for row in rows if "forward_error" in row) > 0.01


def test_pictures_are_the_images_named_in_the_rows(outcome):
    prepared = harness.prepare(tiny(), device="cpu")
    rows = [row for row in outcome.rows if row["attack"] == "guess" and row["method"] == "fedavg"]
    picture = next(p for p in outcome.pictures if p.name == "fedavg-none-guess-round2-seed0")
    for row, original, guess in zip(rows, picture.original, picture.reconstruction, strict=True):
        index = int(row["picture"].partition(":")[2])
        assert torch.equal(original, prepared.dataset.train.inputs[index])
        assert float((original - guess).square().mean()) == pytest.approx(row["mse"], rel=1e-5)


def test_victims_hold_the_classes_asked_for():
    prepared = harness.prepare(tiny("observe.classes=face", "observe.clients=[0, 2]"), device="cpu")
    assert [victim.client for victim in prepared.victims] == [0, 0, 2, 2]
    assert all((victim.data.labels == 0).all() and len(victim.data) == 2 for victim in prepared.victims)
    for victim in prepared.victims:
        assert torch.isin(victim.samples, prepared.partition.train[victim.client]).all()


def test_whole_client():
    prepared = harness.prepare(tiny("observe.images=null", "observe.batch_size=null"), device="cpu")
    (victim,) = prepared.victims
    assert sorted(victim.samples.tolist()) == prepared.partition.train[0].tolist()


def test_seeds_start_anew_on_the_same_images():
    rows = harness.run(harness.prepare(tiny("seeds=[0, 1]", "attack=guess"), device="cpu")).rows
    first, second = ([row for row in rows if row["seed"] == seed] for seed in (0, 1))
    assert [row["picture"] for row in first] == [row["picture"] for row in second]
    assert [row["psnr"] for row in first] != [row["psnr"] for row in second]


def test_rounds_are_watched_when_asked():
    seen: list[tuple[str, int, int]] = []
    prepared = harness.prepare(tiny("observe.rounds=[0, 1]", "attack=guess"), device="cpu")
    rows = harness.run(prepared, progress=lambda *event: seen.append(event)).rows
    assert sorted({row["round"] for row in rows}) == [0, 1]
    assert ("fedavg: training", 2, 2) in seen
    assert ("fedavg: guess", 0, 2) in seen
    assert ("fedavg: guess", 2, 2) in seen


def test_method_without_attack_keeps_its_accuracy():
    experiment = tiny("attack=[{name: guess, against: hyperfl}]")
    rows = harness.run(harness.prepare(experiment, device="cpu")).rows
    (row,) = (row for row in rows if row["method"] == "fedavg")
    assert 0 <= row["accuracy"] <= 1
    assert any("no attack" in line[-1] for line in tables.table(rows, experiment).rows)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("task.model.input_shape=[1, 28, 28]", r"expected input_shape \[1, 8, 8\]"),
        ("observe.images=14", "expected at most the 12 of client 0, got 14"),
        ("observe.clients=3", "expected numbers below 3, got 3"),
        ("observe.classes=fase", "did you mean 'face'"),
        ("observe.classes=2", r"labels in \[0, 2\), got 2"),
        ("federation.partition.train_size=400", "expected 1 to"),
    ],
)
def test_what_does_not_fit_is_refused_before_training(override, said):
    with pytest.raises(ValueError, match=said):
        harness.prepare(tiny(override), device="cpu")


def test_missing_data_set_says_how_to_get_it(monkeypatch):
    monkeypatch.delenv("HYPERLEAK_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="HYPERLEAK_DATA"):
        harness.prepare(tiny("task.dataset=cifar10"), device="cpu")


def test_device_names():
    assert harness.device_of("cpu").type == "cpu"
    assert harness.device_of("auto").type in {"cpu", "cuda"}
    with pytest.raises(ValueError, match="expected device auto, cpu or cuda, got 'gpu'"):
        harness.device_of("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="use --device cpu"):
            harness.device_of("cuda")


def test_results_folder(tmp_path):
    out, experiment = tmp_path / "deep" / "out", tiny()
    outcome = save(out, experiment)
    assert read_rows(out / "images.jsonl") == outcome.rows
    assert config.load(out / "config.yaml") == experiment
    about = (out / "env.json").read_text()
    assert json.loads(about)["device"] == "cpu"
    assert str(tmp_path) not in about
    with np.load(out / "images" / "fedavg-none-guess-round2-seed0.npz", allow_pickle=False) as arrays:
        assert arrays["original"].shape == arrays["reconstruction"].shape == (4, 1, 8, 8)
    assert (out / "images" / "fedavg-none-guess-round2-seed0.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_same_settings_give_identical_rows_and_replace_the_folder(tmp_path):
    save(tmp_path / "out", tiny())
    first = (tmp_path / "out" / "images.jsonl").read_bytes()
    (tmp_path / "out" / "old").touch()
    save(tmp_path / "out", tiny())
    assert (tmp_path / "out" / "images.jsonl").read_bytes() == first
    assert not (tmp_path / "out" / "old").exists()


def test_other_content_is_never_overwritten(tmp_path):
    save(tmp_path / "out", tiny())
    with pytest.raises(ValueError, match="results of other settings"):
        results.check(tmp_path / "out", tiny("seeds=1"))
    (tmp_path / "mine").mkdir()
    results.check(tmp_path / "mine", tiny())
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(ValueError, match="something other than results"):
        results.check(tmp_path / "mine", tiny())
    with pytest.raises(ValueError, match="expected a folder"):
        results.check(tmp_path / "mine" / "thesis.txt", tiny())


@pytest.mark.parametrize("before", [True, False])
def test_a_crash_while_writing_leaves_what_was_there(tmp_path, before, outcome):
    if before:
        save(tmp_path / "out", tiny())
    was = sorted(path.name for path in tmp_path.rglob("*"))
    broken = replace(outcome, rows=[*outcome.rows, {"psnr": float("nan")}])
    with pytest.raises(ValueError, match="not JSON"):
        results.write(tmp_path / "out", tiny(), broken, device="cpu", table="")
    assert sorted(path.name for path in tmp_path.rglob("*")) == was


def test_table_is_readable_without_the_papers(outcome):
    found = tables.table(outcome.rows, tiny())
    assert [row[:2] for row in found.rows] == [("fedavg", "guess"), ("fedavg", "refuse"), ("hyperfl", "guess")]
    assert "defence" not in found.columns
    assert "LPIPS" not in found.columns
    assert found.rows[1][-1] == "not in the mood"
    assert [row[1] for row in found.floors] == list(tables.FLOORS.values())
    legend = "\n".join(found.legend)
    for part in ("PSNR (dB)", "Floor", "Method fedavg", "Method hyperfl", "Attack guess: Noise around mid grey."):
        assert part in legend
    assert "LPIPS" not in legend
    text = tables.markdown(found)
    assert text.count("\n| ") == 2 + len(found.rows) + len(found.floors)


def test_flags_are_explained(outcome):
    experiment = tiny("threat.knows_labels=true")
    found = tables.table(outcome.rows, experiment)
    assert "labels-given" in found.rows[0][-1]
    assert any(line.startswith("Flag labels-given: ") for line in found.legend)


def test_the_table_says_what_leaked(outcome):
    rows = [row for row in outcome.rows if row.get("psnr") is not None and row["method"] == "fedavg"]
    floor = max(sum(r[f"floor_{g}_psnr"] for r in rows) / len(rows) for g in tables.FLOORS)
    for gain, words in ((5.0, "gives picture content away (+"), (-5.0, "no more than a guess")):
        shifted = [{**r, "psnr": max(r[f"floor_{g}_psnr"] for g in tables.FLOORS) + gain} for r in rows]
        assert floor > 0
        assert any(words in line for line in tables.table(shifted, tiny()).legend), words
    peeled = [{**r, "extractor_error": 2e-7, "private_errors": {"embedding": 3e-7}} for r in rows]
    legend = "\n".join(tables.table(peeled, tiny()).legend)
    assert "private embedding was recovered with a relative error of 3e-07" in legend
    assert "private extractor was recovered with a relative error of 2e-07" in legend


def test_table_needs_rows():
    with pytest.raises(ValueError, match="expected rows"):
        tables.table([], tiny())
