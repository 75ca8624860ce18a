"""`hyperleak audit --method`: what is observed, the folder it keeps, and what is said of limits and of nothing."""

from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from support.tiny import CONFIG, Registered
from typer.testing import CliRunner

from attacks.base import Reconstruction
from eval import cli
from eval.audit.findings import AttackFinding, AuditReport
from eval.audit.image_sources import load_images
from eval.audit.request import AuditRequest
from eval.audit.user_model import take_first
from eval.audit.verdict import verdict
from eval.commands import terminal
from eval.metrics.score import score
from eval.report.result_groups import IMAGE, IdentificationRate, ResultGroup, success_share

WORDS = {"dataset": "{name: faces, size: 8}", "model": "tiny", "attack": ("guess",), "device": "cpu"}
FOR = ("--dataset", WORDS["dataset"], "--model", "tiny", "--attack", "guess", "--count", "2", "--device", "cpu")


@pytest.fixture(autouse=True)
def _guesses(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    with Registered():
        yield


def call(*words: object):
    return CliRunner().invoke(cli.app, [*map(str, words)])


@pytest.mark.parametrize("method", ["dp-fedavg", "{name: dp-fedavg, rate: null}", "centaur", "ppsgd", "dp-hyperfl"])
def test_a_private_method_is_observed_with_the_noise_it_trains_with(method):
    (training,) = AuditRequest(method=method, **WORDS).plan().trainings
    trained, seen = training.method.item, training.attack_tasks[0].observation_spec.method
    assert (seen.rate, seen.local_steps, seen.batch_size) == (trained.rate, trained.local_steps, trained.batch_size)
    assert seen.steps == 1


def test_a_default_count_is_whole_batches():
    for batch, count in ((1, 4), (3, 3), (5, 5)):
        (training,) = AuditRequest(method="fedavg", batch_size=batch, **WORDS).plan().trainings
        assert sum(len(victim.samples) for victim in training.attack_tasks[0].observation_spec.targets) == count


def test_the_folder_is_that_of_one_audit(tmp_path):
    folder = tmp_path / "kept"
    assert call("audit", "--method", "fedavg", *FOR, "--out", folder).exit_code == 0
    assert {"table.md", "report.html", "report.md"} <= {path.name for path in folder.iterdir()}
    assert "fedavg on faces" in (folder / "table.md").read_text()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    other = call("audit", "--method", "fedper", *FOR, "--out", folder)
    assert other.exit_code == terminal.USAGE
    assert "holds another run (Audit of fedavg on faces" in other.output
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    again = call("audit", "--method", "fedavg", *FOR, "--out", folder)
    assert again.exit_code == 0, again.output
    assert "fedavg: guess (" not in again.output


def test_a_run_keeps_its_folder(tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "images.jsonl").touch()  # of a version without run.json
    result = call("audit", "--method", "fedavg", *FOR, "--out", tmp_path)
    assert result.exit_code == terminal.USAGE
    assert (tmp_path / "config.yaml").read_text() == CONFIG


def test_images_come_from_a_folder_of_ones_own(tmp_path):
    for name, gray in (("cat", 0), ("dog", 255)):
        (tmp_path / name).mkdir()
        for number in range(5):
            Image.new("L", (8, 8), gray).save(tmp_path / name / f"{number}.png")
    found = take_first(load_images(f"{{name: folder, path: {tmp_path}, mode: gray, size: 8}}"), 3, "folder")
    assert found.inputs.mean((1, 2, 3)).tolist() == found.labels.tolist()
    with pytest.raises(ValueError, match="did you mean 'path'"):
        load_images("{name: folder, pathh: x}")


def test_a_limit_that_guesses_exceed_is_said_to_be_one():
    rows = [
        {"picture": "0:1", "psnr": 48.8, "floor_mean_psnr": 48.9, "floor_grey_psnr": 9.0},
        {"picture": "0:2", "psnr": 25.0, "floor_mean_psnr": 12.0, "floor_grey_psnr": None},
        {"picture": "0:3", "psnr": 12.0, "floor_mean_psnr": 30.0, "floor_grey_psnr": 9.0},
    ]
    found = AuditReport("x", [AttackFinding("ig", rows, "", ""), AttackFinding("rog", rows[:1], "", "")])
    assert found.describe_excess("psnr", 20).startswith(
        "PSNR 48.8 > 20; of the 2 image(s) above it, the best guess without the update exceeds it for 1, too (by up to "
    )
    assert AuditReport("x", [AttackFinding("ig", rows[1:], "", "")]).describe_excess("psnr", 20) == "PSNR 25 > 20"


def test_what_came_back_without_a_picture_is_said():
    truth = SimpleNamespace(inputs=torch.rand(2, 1, 8, 8), labels=torch.tensor([0, 1]), private={}, extractor={})
    features, labels = {"features": torch.ones(2, 3)}, torch.tensor([0, 0])
    said = verdict(score(Reconstruction(None, labels, 0.0, private=features), truth))
    assert said == (
        "the attack recovered no images, only features (the input of a layer behind the first), of which there is no "
        "true value to compare with; 1 of 2 label(s) recovered"
    )
    assert verdict(score(Reconstruction(None, None, 0.0), truth)) == (
        "the attack recovered no images, nor any private tensor"
    )
    assert "unscored" not in score(Reconstruction(truth.inputs, labels, 0.0, private=features), truth)[0]


def test_an_image_for_which_no_label_came_back_is_counted():
    truth = SimpleNamespace(inputs=torch.rand(2, 1, 8, 8), labels=torch.tensor([0, 1]), private={}, extractor={})
    named = score(Reconstruction(truth.inputs, truth.labels, 0.0), truth)
    silent = score(Reconstruction(truth.inputs, None, 0.0), truth)
    for update, rows in enumerate((named, silent)):
        for row in rows:
            row[IMAGE] = f"{update}:{row['image']}"
    assert verdict([*named, *silent]).endswith("; 2 of 4 label(s) recovered")
    assert verdict(named).endswith("; 2 of 2 label(s) recovered")
    assert "label(s)" not in verdict(silent)
    rows = tuple(
        {**row, "seed": 0, IMAGE: number, "label": number} for number, row in enumerate([*named[:1], *silent, *silent])
    )
    group = ResultGroup("fedavg", "none", "ig", 0, rows)
    assert group.label_recovery_rate.value == pytest.approx(1 / 5)
    assert group.commonest_label_share == pytest.approx(1 / 5)
    assert group.label_gain.value == 0
    assert ResultGroup("fedavg", "none", "ig", 0, rows[1:]).label_recovery_rate is None


def test_shares_of_one_report_have_one_kind_of_interval():
    rows = [{"seed": 0, IMAGE: number, "hit": float(number < 3)} for number in range(4)]
    found = success_share(rows, "hit")
    assert (found.low, found.high) == IdentificationRate(3, 4, 0.02).interval
    assert (found.value, found.images, found.count) == (0.75, 4, 4)
