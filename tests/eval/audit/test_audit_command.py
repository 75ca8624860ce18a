"""`hyperleak audit`: a method, a model of one's own, a captured update."""

import json
import re

import numpy as np
import pytest
import torch
from support.audit_command import PERCEPTRON, audit, written
from support.tiny import Registered

from eval.audit.findings import report_from_rows
from eval.audit.request import AuditRequest
from eval.commands import terminal
from eval.io.jsonl import read_rows
from fl.capture import from_batch
from fl.data.sources import npz_files
from fl.methods.fedavg import FedAvg
from fl.view import ThreatModel

MODULE = f"""{PERCEPTRON}
def whole():
    generator = torch.Generator().manual_seed(1)
    return build(), torch.rand(4, 1, 8, 8, generator=generator), torch.tensor([0, 1, 2, 0])

def nothing():
    return 3

def empty():
    return build(), torch.rand(0, 1, 8, 8), torch.zeros(0, dtype=torch.int64)

def unlabeled():
    return build(), torch.rand(4, 1, 8, 8), torch.tensor([0, 1])

def refusing():
    raise ValueError("mine")

def dropping():
    hidden = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(64, 3))
    return torch.nn.Sequential(torch.nn.Flatten(), hidden), torch.rand(1, 1, 8, 8), torch.tensor([0])
"""


METHOD = ("--method", "fedavg", "--dataset", "{name: faces, size: 8}", "--model", "tiny", "--attack", "guess")
CAPTURED = ("--update", "UPDATE", "--model", "MINE:build", "--input-shape", "1,8,8")


@pytest.fixture(autouse=True)
def _guesses(monkeypatch, tmp_path):
    name = written(monkeypatch, tmp_path, "mine", MODULE)
    with Registered():
        yield name


@pytest.fixture
def mine(_guesses):
    return _guesses


def test_a_method_is_audited_and_reported(tmp_path, monkeypatch):
    words = ("--method", "{name: fedavg, lr: 0.1}", "--dataset", "{name: faces, size: 8}", "--model", "tiny")
    monkeypatch.setattr("sys.argv", ["hyperleak", "audit", *words, "--out", str(tmp_path / "kept")])
    result = audit(*words, "--attack", "guess", "--attack", "peel", "--count", 2, "--out", tmp_path / "kept")
    assert result.exit_code == 0, result.output
    assert "fedavg on faces" in result.output
    assert "guess: no image content shown to leak: 0 of 2" in result.output
    assert "peel: not applicable:" in result.output
    assert "image 1: PSNR" in result.output
    assert (tmp_path / "kept" / "images.jsonl").is_file()
    written = (tmp_path / "kept" / "report.md").read_text()
    assert "hyperleak audit --method '{name: fedavg, lr: 0.1}'" in written  # how to do it again
    assert "--out kept" in written


def test_a_method_with_a_length_of_its_own_keeps_it(monkeypatch):
    words = {"dataset": "{name: faces, size: 8}", "model": "tiny", "attack": ("guess",), "device": "cpu"}
    for method, steps in (("fedavg", 1), ("{name: fedavg, steps: 3}", 3), ("{name: fedavg, epochs: 2}", None)):
        (training,) = AuditRequest(method=method, **words).plan().trainings
        assert training.attack_tasks[0].observation_spec.method.steps == steps


def test_a_method_that_keeps_its_secrets_badly():
    words = ("--method", "{name: hyperfl, parametrization: {name: hypernetwork, init: scaled}}", "--dataset", "faces")
    result = audit(*words, "--attack", "peel", "--count", 1)
    assert result.exit_code == 0, result.output
    assert (
        "private embedding leaked: recovered for 1 of 1 update(s) (relative error below 0.1, at best" in result.output
    )
    assert "  flags: single-image\n" in result.output
    assert "\nflag single-image: All figures come from one image" in result.output


def test_a_model_with_its_own_images(mine, tmp_path):
    result = audit(f"{mine}:whole", "--attack", "{name: ig, iterations: 300, tv_weight: 0}", "--max-psnr", 20, "--json")
    assert result.exit_code == terminal.LEAKED, result.output
    found = json.loads(result.stdout)
    assert found["above"] == ["psnr"]
    assert found["max_psnr"] > 20
    (finding,) = found["findings"]
    assert len(finding["images"]) == 4
    assert "above the limit: PSNR" in result.stderr
    calm = audit(f"{mine}:whole", "--attack", "guess", "--max-psnr", 20, "--out", tmp_path / "kept")
    assert calm.exit_code == 0, calm.output
    assert (tmp_path / "kept" / "images" / "fedavg-none-guess-round0-seed0.png").is_file()
    with np.load(tmp_path / "kept" / "images" / "fedavg-none-guess-round0-seed0.npz") as arrays:
        assert arrays["original"].shape == arrays["reconstruction"].shape == (4, 1, 8, 8)


def test_a_model_with_images_from_a_file(mine, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (6, 8, 8, 1), np.uint8)
    npz_files.save_images(tmp_path / "data.npz", pixels, np.arange(6) % 3, ["a", "b", "c"])
    words = (f"{mine}:build", "--images", tmp_path / "data.npz", "--attack", "guess")
    assert len(json.loads(audit(*words, "--count", 6, "--json").stdout)["findings"][0]["images"]) == 6
    batch = audit(
        *words, "--batch-size", 2, "--method", "{name: fedavg, steps: 2, batch_size: 2}", "--defense", "noise"
    )
    assert batch.exit_code == 0, batch.output
    assert "at least 7 images" in audit(*words, "--count", 7).output
    assert "that 3 (--batch-size) divides" in audit(*words, "--count", 4, "--batch-size", 3).output
    assert len(json.loads(audit(*words, "--batch-size", 3, "--json").stdout)["findings"][0]["images"]) == 3


def test_gray_images_from_a_file_need_no_channels_and_no_names(mine, tmp_path):
    pixels, labels = np.random.default_rng(0).integers(0, 255, (6, 8, 8), np.uint8), np.arange(6) % 3
    npz_files.save_images(tmp_path / "full.npz", pixels[..., None], labels, ["a", "b", "c"])
    np.savez(tmp_path / "bare.npz", images=pixels, labels=labels)
    words = (f"{mine}:build", "--attack", "guess", "--json", "--images")
    bare, full = (audit(*words, tmp_path / f"{name}.npz") for name in ("bare", "full"))
    assert (bare.exit_code, bare.stdout) == (0, full.stdout)
    np.savez(tmp_path / "bare.npz", images=pixels, labels=labels + 1)  # more classes than the model has outputs
    assert "expected labels in [0, 3), got" in audit(*words, tmp_path / "bare.npz", "--count", 6).output
    first = audit(*words, tmp_path / "bare.npz", "--count", 1)  # whose own label would do
    assert "got 1 to 3; where classes are numbered from 1, take labels - 1" in first.output
    np.savez(tmp_path / "bare.npz", images=pixels.astype(np.int64), labels=labels)
    assert "expected images uint8 [N, H, W, 1 or 3] in" in audit(*words, tmp_path / "bare.npz").output


def captured(mine, tmp_path, suffix):
    model = __import__(mine).build()
    inputs = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(5))
    view, _ = from_batch(model, inputs, torch.tensor([2]))
    path = tmp_path / f"update.{suffix}"
    if suffix == "npz":
        np.savez(path, **{name: value.numpy() for name, value in view.update.items()})
    else:
        torch.save(dict(view.update), path)
    npz_files.save_images(
        tmp_path / "true.npz", (inputs * 255).byte().permute(0, 2, 3, 1).numpy(), np.array([2]), ["a", "b", "c"]
    )
    return path


@pytest.mark.parametrize("suffix", ["npz", "pt"])
def test_a_captured_update_is_decided_once_the_true_images_are_given(mine, tmp_path, suffix):
    path = captured(mine, tmp_path, suffix)
    attack = ("--attack", "{name: ig, iterations: 300, tv_weight: 0}")
    blind = audit(
        "--update", path, "--model", f"{mine}:build", "--input-shape", "1,8,8", *attack, "--out", tmp_path / "o"
    )
    assert blind.exit_code == terminal.UNDECIDED, blind.output
    assert "give the true images (--images)" in blind.output
    assert "recovered labels: 2" in blind.output
    (line,) = [line for line in blind.output.splitlines() if line.startswith("ig: ")]
    assert re.search(r"1 - cos = [\d.e-]+ \(below 0\.1 it explains the update\)", line)
    (row,) = read_rows(tmp_path / "o" / "images.jsonl")
    assert 0 < row["misfit"] < 0.1
    assert (tmp_path / "o" / "images" / "fedavg-none-ig-round0-seed0.png").is_file()
    known = audit(
        "--update", path, "--model", f"{mine}:build", "--images", tmp_path / "true.npz", *attack, "--max-psnr", 20
    )
    assert known.exit_code == terminal.LEAKED, known.output
    assert "image content leaked: 1 of 1" in known.output


def test_labels_that_the_attacker_knows_are_given_without_images(mine, tmp_path):
    path = captured(mine, tmp_path, "npz")
    words = (
        "update",
        path,
        "--model",
        f"{mine}:build",
        "--input-shape",
        "1,8,8",
        "--attack",
        "{name: ig, iterations: 9}",
    )
    told = json.loads(audit(*words, "--labels", 2, "--json").stdout)["findings"][0]
    assert told["labels"] == []  # what is known is not recovered
    assert json.loads(audit(*words, "--json").stdout)["findings"][0]["labels"] == [[2]]
    for labels, said in (
        ("cat", "a number for each image, such as 3,0, got 'cat'"),
        ("1,2", "as many labels"),
        (7, "[0, 3)"),
    ):
        refused = audit(*words, "--labels", labels)
        assert refused.exit_code == terminal.USAGE
        assert said in refused.output
    beside = audit(*words[:4], "--images", tmp_path / "true.npz", "--labels", 2)
    assert "--labels goes with an update without its images" in beside.output
    assert "--labels 3,0" in audit(*words, "--threat", "{knows_labels: true}").output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "expected MODULE:FUNCTION, --update with --model, or --method with --dataset"),
        (["--method", "hyperfll", "--dataset", "faces"], "did you mean 'hyperfl'"),
        (["--method", "fedavg", "--dataset", "face"], "did you mean 'faces'"),
        (["--method", "fedavg", "--dataset", "{name: faces, size: 8}"], "expected --model for images of 1x8x8"),
        (["--method", "fedavg", "--dataset", "faces", "--images", "faces"], "a method takes its images from --dataset"),
        (["--method", "fedavg", "--dataset", "faces", "--attack", "gues"], "did you mean 'guess'"),
        (["MINE:bild"], "did you mean 'build'"),
        (["MINE:build"], "expected --images"),
        (["MINE:nothing"], "got int"),
        (["MINE"], "expected module:function"),
        (["my_model"], "expected module:function"),
        (["updat", "nowhere.npz"], "no source 'updat'; did you mean 'update'?"),
        (["no_such_module:build"], "no module 'no_such_module'"),
        (["MINE:whole", "--dataset", "faces"], "--dataset goes with --method alone"),
        (["MINE:build", "--images", "nowhere.npz"], "no file nowhere.npz"),
        (["MINE:build", "--images", "faces"], "expected inputs that fit the model"),
        (["MINE:whole", "--model", "MINE:build"], "expected one model"),
        (["MINE:whole", "--input-shape", "1,8,8"], "--input-shape goes with --update alone"),
        (["MINE:whole", "--mean", "a,b"], "expected --mean as numbers"),
        (["--update", "nowhere.npz", "--model", "MINE:build"], "no file nowhere.npz"),
        (["--update", "nowhere.npz"], "expected --model MODULE:FUNCTION"),
        (["--update", "UPDATE", "--model", "MINE:build"], "expected --input-shape C,H,W"),
        (["--update", "UPDATE", "--model", "MINE:build", "--input-shape", "8,x"], "such as 3,32,32"),
        (["--update", "UPDATE", "--model", "MINE:build", "--input-shape", "3,9,9"], "that fit the model"),
        (["--update", "UPDATE", "--model", "MINE:build", "--input-shape", "1,8,8", "--max-psnr", "9"], "true images"),
        (["--update", "TEXT", "--model", "MINE:build", "--input-shape", "1,8,8"], "expected tensors by parameter name"),
        (["MINE:whole", "--max-psnr", "nan"], "expected --max-psnr as a finite number, got nan"),
        (["MINE:whole", "--max-psnr", "inf"], "expected --max-psnr as a finite number, got inf"),
        (["MINE:whole", "--max-ssim", "nan"], "expected --max-ssim as a finite number, got nan"),
        (["MINE:whole", "--max-ssim", "1.5"], "expected --max-ssim in [-1, 1], got 1.5"),
        (["MINE:whole", "--max-ssim", "-1.5"], "expected --max-ssim in [-1, 1], got -1.5"),
        (["MINE:whole", "--count", "5"], "at least 5 images"),
        (["MINE:empty"], "to give at least one image"),
        (["MINE:unlabeled"], "to give one label per image, int64 (4,), got torch.int64 (2,)"),
        (["MINE:dropping"], "--method '{name: fedavg, train_mode: false}', or let your function return model.eval()"),
        (["MINE:dropping", "--method", "fedper"], "--method '{name: fedper, ..., train_mode: false}'"),
        (
            ["MINE:whole", "--attack", "crash", "--out", "text.pt"],
            "expected a folder for results, got the file text.pt",
        ),
        (["MINE:whole", "--attack", "crash", "--out", "text.pt/below"], "expected --out as a folder to write to"),
        (["--update", "UPDATE", "--model", "MINE:whole", "--batch-size", "5"], "give a smaller --batch-size"),
        (["--update", "UPDATE", "--model", "MINE:whole", "--input-shape", "1,4,16"], "true images of --input-shape"),
        (
            ["--update", "OBJECT", "--model", "MINE:build", "--input-shape", "1,8,8"],
            "got other objects; pickle can run code",
        ),
        (["--update", "TEXT", "--model", "MINE:build", "--input-shape", "1,8,8"], "can't be read as .pt: "),
        (["--update", "JUNK", "--model", "MINE:build", "--input-shape", "1,8,8"], "can't be read as .npz: "),
        (["--update", "UPDATE", "--model", "MINE:build", "--count", "3"], "--count does not go with --update"),
        ([*CAPTURED, "--images", "true.npz", "--batch-size", "9"], "give a smaller --batch-size\n"),
        (
            [*CAPTURED, "--method", "hyperfl"],
            "no option takes it; call fl.capture.from_update(..., shared=...)",
        ),
        (["MINE:build", "--images", "folder"], "path, got none; give it as settings: '{name: folder, ...}'"),
        (["MINE:refusing"], ":refusing raised ValueError: mine"),
        ([*METHOD, "--count", "3", "--batch-size", "2"], "--count: expected a multiple of batch_size 2, got 3"),
        ([*METHOD, "--count", "9999"], "--count: expected at most the 40 training images of client 0, got 9999"),
        ([*METHOD, "--seed", "9" * 23], "--seed: expected a whole number >= -2^63 and < 2^64, got 99999"),
    ],
)
def test_what_is_asked_for_wrongly_is_said_in_one_line(mine, tmp_path, words, said):
    captured(mine, tmp_path, "npz")
    (tmp_path / "text.pt").write_text("hello")
    torch.save(torch.nn.Linear(1, 1), tmp_path / "object.pt")
    (tmp_path / "junk.npz").write_text("hello")
    places = {"MINE": mine, "UPDATE": "update.npz", "TEXT": "text.pt", "OBJECT": "object.pt", "JUNK": "junk.npz"}
    for name, place in places.items():
        words = [word.replace(name, place) for word in words]
    result = audit(*words)
    assert result.exit_code == terminal.USAGE, result.output
    assert said in result.output
    assert result.output.count("\n") == 1


def test_no_limit_is_kept_where_nothing_could_be_measured(mine):
    result = audit(f"{mine}:whole", "--attack", "refuse", "--max-psnr", 20)
    assert result.exit_code == terminal.UNDECIDED
    assert "no PSNR could be taken" in result.output
    small = audit(f"{mine}:whole", "--attack", "guess", "--max-ssim", 0.9)  # 8x8 is too small for SSIM
    assert small.exit_code == terminal.UNDECIDED
    both = audit(f"{mine}:whole", "--attack", "guess", "--max-ssim", 0.9, "--max-psnr", 1)
    assert both.exit_code == terminal.LEAKED


def test_a_failing_attack_is_a_failure(mine):
    result = audit(f"{mine}:whole", "--attack", "crash")
    assert result.exit_code == terminal.FAILURE
    assert "expected the sky to hold" in result.output
    method = audit("--method", "fedavg", "--dataset", "{name: faces, size: 8}", "--model", "tiny", "--attack", "crash")
    assert method.exit_code == terminal.FAILURE
    assert "expected the sky to hold" in method.output


def test_a_limit_is_exceeded_from_just_above_it(mine):
    """Half a decibel above the limit is above it; the limit itself is not."""
    best = json.loads(audit(f"{mine}:whole", "--attack", "guess", "--json").stdout)["max_psnr"]
    for limit, code in ((best - 0.5, terminal.LEAKED), (best, 0), (best + 0.5, 0)):
        assert audit(f"{mine}:whole", "--attack", "guess", "--max-psnr", repr(limit)).exit_code == code


def test_an_ssim_is_exceeded_from_just_above_its_limit():
    words = ("--method", "fedavg", "--dataset", "{name: faces, size: 12}", "--attack", "guess", "--count", 1)
    words += ("--model", "{name: linear, input_shape: [1, 12, 12]}")
    best = json.loads(audit(*words, "--json").stdout)["max_ssim"]
    for limit, code in ((best - 0.01, terminal.LEAKED), (best, 0)):
        assert audit(*words, "--max-ssim", repr(limit)).exit_code == code


def altered(mine, path, change):
    """A captured update that does not belong to the model and the images any more."""
    with np.load(path) as file:
        update = {name: torch.from_numpy(file[name]) for name in file.files}
    wrong = path.with_name("wrong.npz")
    np.savez(wrong, **{name: change(value).numpy() for name, value in update.items()})
    return ("--update", wrong, "--model", f"{mine}:build", "--images", "true.npz", "--attack", "guess")


@pytest.mark.parametrize(
    "change", [torch.neg, lambda value: torch.rand(value.shape, generator=torch.Generator().manual_seed(0)) - 0.5]
)
def test_an_update_that_does_not_belong_passes_no_limit(mine, tmp_path, change):
    words = altered(mine, captured(mine, tmp_path, "npz"), change)
    said = "the update is not what this model makes of these images"
    warned = audit(*words)
    assert warned.exit_code == terminal.UNDECIDED, warned.output
    assert warned.stdout.startswith(f"contradiction: {said}")
    assert "not decided: settings and update contradict each other" in warned.stderr
    limited = audit(*words, "--max-psnr", 60, "--json")
    assert limited.exit_code == terminal.UNDECIDED
    assert f"not decided: settings and update contradict each other: {said}" in limited.stderr
    assert "check the sign, mean and std, --method, --loss (smoothing, weights), --batch-size" in limited.stderr
    found = json.loads(limited.stdout)
    assert found["mismatch"].startswith(said)
    assert found["undecided"][0]["why"] == found["mismatch"]
    assert "forward-mismatch" in found["findings"][0]["flags"]
    assert found["findings"][0]["images"][0]["forward_error"] > 0.5
    assert audit(*words, "--max-psnr", 1).exit_code == terminal.LEAKED


def test_an_update_of_more_images_passes_no_limit(mine, tmp_path):
    model, inputs, labels = __import__(mine).whole()
    view, _ = from_batch(model, inputs, labels)
    np.savez(tmp_path / "four.npz", **{name: value.numpy() for name, value in view.update.items()})
    words = ("--update", tmp_path / "four.npz", "--model", f"{mine}:whole", "--attack", "guess", "--max-psnr", 60)
    assert audit(*words).exit_code == terminal.UNDECIDED
    assert audit(*words, "--batch-size", 4).exit_code == 0


def test_an_update_that_belongs_passes_whatever_its_step_size(mine, tmp_path):
    path = captured(mine, tmp_path, "npz")
    for factor in (1, 0.01):
        result = audit(*altered(mine, path, lambda value, factor=factor: value * factor), "--max-psnr", 60)
        assert result.exit_code == 0, result.output
    stated = altered(mine, path, lambda value: value * 0.01)
    assert audit(*stated, "--max-psnr", 60, "--method", "{name: fedavg, lr: 0.01}").exit_code == 0
    assert audit(*stated, "--max-psnr", 60, "--method", "{name: fedavg, lr: 0.1}").exit_code == terminal.UNDECIDED


def test_an_update_of_steps_in_an_unknown_order_belongs_unless_it_is_far_off(mine, tmp_path):
    model, inputs, labels = __import__(mine).whole()
    settings = {"steps": 4, "batch_size": 1, "lr": 0.02}
    view, _ = from_batch(model, inputs, labels, method=FedAvg(**settings), seed=2)
    for name, sign, code in (("right", 1, 0), ("flipped", -1, terminal.UNDECIDED)):
        np.savez(tmp_path / f"{name}.npz", **{key: sign * value.numpy() for key, value in view.update.items()})
        words = ("--update", tmp_path / f"{name}.npz", "--model", f"{mine}:whole", "--batch-size", 4)
        result = audit(
            *words, "--method", json.dumps({"name": "fedavg", **settings}), "--attack", "guess", "--max-psnr", 60
        )
        assert result.exit_code == code, result.output


def test_what_can_not_be_checked_is_said(mine, tmp_path):
    words = altered(mine, captured(mine, tmp_path, "npz"), torch.neg)
    result = audit(*words, "--defense", "noise")
    assert result.exit_code == 0, result.output
    assert "note: not checked whether the update belongs to these images" in result.output


def test_the_images_of_a_function_are_counted(mine):
    found = json.loads(audit(f"{mine}:whole", "--attack", "guess", "--count", 1, "--json").stdout)
    assert len(found["findings"][0]["images"]) == 1
    assert found["notes"][0] == f"the first 1 of 4 images that {mine}:whole gives"
    assert (
        f"note: the first 2 of 4 images that {mine}:whole gives"
        in audit(f"{mine}:whole", "--attack", "guess", "--count", 2).output
    )


def test_attacks_of_one_name_keep_pictures_of_their_own(mine, tmp_path):
    twice = ("--attack", "guess", "--attack", "{name: guess, spread: 0}")
    assert audit(f"{mine}:whole", *twice, "--out", tmp_path / "kept").exit_code == 0
    spreads = [
        np.load(tmp_path / "kept" / "images" / f"fedavg-none-{name}-round0-seed0.npz")["reconstruction"].std()
        for name in ("guess", "guess-2")
    ]
    assert spreads[0] > 0.05
    assert spreads[1] == 0
    words = ("--method", "fedavg", "--dataset", "{name: faces, size: 8}", "--model", "tiny", *twice, "--count", 1)
    result = audit(*words, "--json")
    assert [finding["attack"] for finding in json.loads(result.stdout)["findings"]] == ["guess", "guess-2"]


def test_a_model_with_dropout_is_audited_as_the_error_says(mine):
    words = (f"{mine}:dropping", "--attack", "guess", "--method", "{name: fedavg, train_mode: false}")
    assert audit(*words).exit_code == 0


def test_a_method_has_flags_and_forward_errors():
    words = ("--method", "fedavg", "--dataset", "{name: faces, size: 8}", "--model", "tiny", "--attack", "guess")
    (finding,) = json.loads(audit(*words, "--json").stdout)["findings"]
    assert "ssim-missing" in finding["flags"]
    assert "forward-mismatch" not in finding["flags"]
    assert finding["images"][0]["forward_error"] < 1e-4
    wrong = [{**row, "forward_error": 0.1} for row in finding["images"]]
    (flagged,) = report_from_rows(
        "x", [{**row, "attack": "guess"} for row in wrong], threat=ThreatModel(), defended=True
    ).findings
    assert {"forward-mismatch", "defense-known"} <= set(flagged.flags)
