"""`hyperleak audit` of a model of one's own: attacks that fail, progress, images that do not fit, labels."""

import json
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from support import tiny
from support.audit_command import audit, written
from support.tiny import Registered

from eval.commands import terminal
from eval.io.errors import describe_origin
from fl.capture import from_batch

MODULE = """
import torch

def gray():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.Sigmoid(), torch.nn.Linear(16, 3))

def whole():
    return gray(), torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 0])

def double():
    return gray().double()

def half():
    return gray().half()

def bfloat16():
    return gray().bfloat16()

def whole_double():
    model, *rest = whole()
    return model.double(), *rest

const = gray()

def needing(width):
    return gray()

class Odd(RuntimeError):
    pass

def raising():
    raise Odd("of my own")

def lacking():
    import no_such_module

def meta():
    return torch.nn.Linear(64, 3, device="meta")

def table():
    torch.manual_seed(0)
    layers = torch.nn.Linear(12, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)
    return torch.nn.Sequential(*layers), torch.randn(1, 12).clamp(-3, 3), torch.ones(1)

class Named(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.head = torch.nn.Conv2d(1, 4, 3), torch.nn.Conv2d(4, 3, 1)

    def forward(self, images):
        scores = self.head(self.features(images).tanh())
        return {"maps": scores, "scores": scores.mean((2, 3))}

def named():
    torch.manual_seed(0)
    return Named(), torch.rand(1, 1, 8, 8), torch.tensor([1])

def weightless():
    return torch.nn.Flatten()

def color():
    layers = torch.nn.Conv2d(3, 2, 3), torch.nn.Flatten(), torch.nn.Linear(2 * 30 * 30, 10)
    return torch.nn.Sequential(*layers)

def pooled():
    layers = torch.nn.Conv2d(3, 2, 3), torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(8, 10)
    return torch.nn.Sequential(*layers)

def five():
    return torch.nn.Sequential(torch.nn.Conv2d(5, 2, 3), torch.nn.Flatten(), torch.nn.Linear(2 * 30 * 30, 10))

def broken():
    return torch.nn.Sequential(torch.nn.Conv2d(3, 2, 3), torch.nn.Linear(7, 10))
"""
METHOD = ("--method", "fedavg", "--dataset", "{name: faces, size: 8}", "--model", "tiny", "--count", 2)


@pytest.fixture
def mine(monkeypatch, tmp_path):
    name = written(monkeypatch, tmp_path, "own", MODULE)
    with Registered(), torch.random.fork_rng():
        yield name


CRASHING = ("--attack", "{name: crash, fault: true}", "--attack", "guess")


@pytest.mark.parametrize("own", [True, False])
def test_what_other_attacks_found_is_kept_where_one_fails(mine, tmp_path, own):
    words = ((f"{mine}:whole",) if own else METHOD) + CRASHING
    result = audit(*words)
    assert result.exit_code == terminal.FAILURE, result.output
    assert "\nguess: " in result.stdout
    assert "image 0: PSNR" in result.stdout
    assert "\ncrash: failed: RuntimeError: expected the sky to hold, got rain\n" in result.stdout
    said = (
        r"error: crash failed: RuntimeError: expected the sky to hold, got rain \(\S*tiny\.py, line (\d+); --out FOLDER"
    )
    number = re.search(said, result.stderr)
    assert number
    assert "expected the sky to hold" in Path(tiny.__file__).read_text().splitlines()[int(number[1]) - 1]
    kept = audit(*words, "--json", "--max-psnr", 1, "--out", tmp_path / "kept")
    assert kept.exit_code == terminal.LEAKED, kept.output  # what leaked counts for more
    found = {finding["attack"]: finding for finding in json.loads(kept.stdout)["findings"]}
    assert found["guess"]["failed"] is None
    assert found["guess"]["images"]
    assert found["crash"]["failed"] == "RuntimeError: expected the sky to hold, got rain"
    where = tmp_path / found["crash"]["traceback"]
    assert where.read_text().rstrip().endswith("RuntimeError: expected the sky to hold, got rain")
    assert f"; the traceback is in {where})" in kept.stderr
    assert found["crash"]["origin"].endswith(f"tiny.py, line {number[1]}")


def test_an_error_inside_a_package_is_said_with_the_line_of_the_user_that_came_to_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine_within.py").write_text(
        "import torch\n\n\ndef run():\n    return torch.zeros(2) @ torch.zeros(3)\n"
    )
    import mine_within

    with pytest.raises(RuntimeError) as caught:
        mine_within.run()
    assert describe_origin(caught.value) == "mine_within.py, line 5"
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("{")
    assert describe_origin(caught.value).endswith("test_audit_own.py, line " + str(caught.tb.tb_lineno))
    with ProcessPoolExecutor(1) as pool, pytest.raises(RuntimeError) as caught:
        pool.submit(mine_within.run).result()
    assert describe_origin(caught.value) == "mine_within.py, line 5"


def test_an_attack_that_fails_keeps_no_limit(mine):
    assert audit(f"{mine}:whole", *CRASHING, "--max-psnr", 60).exit_code == terminal.FAILURE
    assert audit(f"{mine}:whole", "--attack", "guess", "--max-psnr", 60).exit_code == 0


def test_an_audit_tells_on_stderr_how_far_it_is(mine):
    words = (f"{mine}:whole", "--attack", "guess", "--batch-size", 2)
    for more in ((), ("--json",)):
        result = audit(*words, *more)
        first, last = result.stderr.splitlines()
        assert first == f"{mine}:whole: guess (0/2)"
        assert re.fullmatch(rf"{mine}:whole: guess \(2/2\), [0-9.]+ s", last)
        assert "guess (" not in result.stdout


@pytest.mark.parametrize(
    ("model", "source", "said"),
    [
        (
            "gray",
            "photos",
            "got 3x32x32 of photos; it runs on 1x8x8: give --images '{name: faces, size: 8}', or an .npz",
        ),
        (
            "color",
            "faces",
            "got 1x28x28 of faces; it runs on 3x32x32: give --images '{name: photos, size: 32}', or an",
        ),
        (
            "pooled",
            "faces",
            "it runs on 3x28x28 (and 10 more sizes that were tried): give --images '{name: photos, size:",
        ),
        ("five", "faces", "it runs on 5x32x32: give an .npz file of such images (see --help)\n"),
        ("broken", "faces", "it says: "),
    ],
)
def test_images_that_do_not_fit_are_refused_with_some_that_do(mine, tmp_path, model, source, said):
    words = ("--attack", "crash", "--images")
    result = audit(f"{mine}:{model}", *words, source)
    assert result.exit_code == terminal.USAGE
    assert said in result.output
    assert result.output.count("\n") == 1
    if match := re.search(r"give --images '(.*?)'", result.output):
        taken = audit(f"{mine}:{model}", "--attack", "guess", "--images", match[1], "--count", 1)
        assert taken.exit_code == 0, taken.output
    np.savez(tmp_path / "update.npz", none=np.zeros(1))
    update = audit("--update", "update.npz", "--model", f"{mine}:{model}", *words, source, "--batch-size", 1)
    assert said in update.output
    shape = ("--images", source, "--input-shape", "1,31,29")
    given = audit("--update", "update.npz", "--model", f"{mine}:{model}", *shape)
    assert given.exit_code == terminal.USAGE
    assert "expected --input-shape of images that fit the model, got 1x31x29; it " in given.output


def test_an_update_is_scored_against_the_first_images_and_that_is_said(mine, tmp_path):
    model, inputs, labels = __import__(mine).whole()
    view, _ = from_batch(model, inputs[2:3], labels[2:3])
    torch.save({"update": {f"module.{name}": -value for name, value in view.update.items()}}, tmp_path / "update.pt")
    words = ("--update", "update.pt", "--attack", "guess")
    known = audit(*words, "--model", f"{mine}:whole")
    assert f"note: scored against the first 1 of 4 images in {mine}:whole (--batch-size 1)\n" in known.stdout
    assert "note: names lose module., which wrapping a model adds\n" in known.stdout
    assert "note: the update is what update.pt holds under 'update'\n" in known.stdout
    said = "contradiction: the update is not what this model makes of these images (relative error 0.9): the sign"
    assert known.stdout.startswith(said)
    blind = audit(*words, "--model", f"{mine}:gray", "--input-shape", "1,8,8")
    assert blind.stdout.startswith("contradiction: the sign of the update is turned: ")
    assert "recovered labels (doubtful): 0\n" in blind.stdout
    torch.save(dict(view.update), tmp_path / "update.pt")
    right = audit(*words, "--model", f"{mine}:gray", "--input-shape", "1,8,8")
    assert "contradiction" not in right.output
    assert "recovered labels: 0\n" in right.stdout
    other = audit(*words, "--model", f"{mine}:whole")
    assert "it is what the model makes of images[2] of those given, counted from 0: give these first" in other.stdout


def test_an_attack_that_has_the_images_beforehand_is_not_believed(mine):
    faces = "{name: faces, size: 8}"
    lti = f"{{name: lti, auxiliary: {faces}, iterations: 2, batch: 2, width: 4, hashed: 16, part: %s}}"
    words = (f"{mine}:gray", "--images", faces, "--count", 2, "--json", "--attack")
    fair = audit(*words, lti % "test")
    assert (json.loads(fair.stdout)["findings"][0]["failed"], fair.exit_code) == (None, 0)
    unfair = audit(*words, lti % "train")  # whose images an audit takes
    assert "attack 'lti': expected images that are not attacked, got 2 of the 2" in unfair.output
    assert unfair.exit_code == terminal.USAGE


@pytest.mark.parametrize("model", ["double", "half", "bfloat16"])
def test_images_are_brought_to_the_model_s_floating_type(mine, tmp_path, model):
    words = (f"{mine}:{model}", "--images", "{name: faces, size: 8}", "--count", 1, "--attack", "analytic")
    result = audit(*words, "--json", "--out", tmp_path / "kept")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["mismatch"], found["findings"][0]["failed"]) == (None, None)
    assert found["max_psnr"] > 25
    assert (tmp_path / "kept" / "images" / "fedavg-none-analytic-round0-seed0.png").is_file()


def test_images_of_a_function_are_brought_to_its_model_s_floating_type(mine):
    assert audit(f"{mine}:whole_double", "--attack", "guess").exit_code == 0


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (
            "needing",
            "required positional argument: 'width'; it is called without arguments: name a function of your own",
        ),
        ("raising", "raised Odd: of my own (line "),
        ("lacking", "raised ModuleNotFoundError: No module named 'no_such_module' (line "),
        ("meta", "a model with weights, got one on the meta device"),
        ("weightless", "a model with parameters, got one without"),
    ],
)
def test_what_a_function_does_wrong_is_said_in_one_line(mine, function, said):
    result = audit(f"{mine}:{function}", "--images", "{name: faces, size: 8}")
    assert result.exit_code == terminal.USAGE, result.output
    assert f"{mine}:{function}" in result.output
    assert said in result.output
    assert result.output.count("\n") == 1


def test_a_module_that_raises_is_said_in_one_line(mine, tmp_path):
    (tmp_path / f"un{mine}.py").write_text("1 / 0\n")
    result = audit(f"un{mine}:build")
    assert result.exit_code == terminal.USAGE, result.output
    assert result.output == f"error: un{mine} raised ZeroDivisionError: division by zero (line 1)\n"


def test_a_model_may_stand_in_the_place_of_its_function(mine):
    words = (f"{mine}:const", "--images", "{name: faces, size: 8}", "--count", 1, "--attack", "guess")
    assert audit(*words).exit_code == 0


def test_a_file_of_few_images_is_taken_whole(mine, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (2, 8, 8), np.uint8)
    np.savez(tmp_path / "two.npz", images=pixels, labels=np.arange(2))
    words = (f"{mine}:gray", "--images", "two.npz", "--attack", "guess")
    for size in (1, 2):
        found = json.loads(audit(*words, "--batch-size", size, "--json").stdout)
        assert len(found["findings"][0]["images"]) == 2
    assert "at least 3 images in two.npz, got 2; give a smaller --count" in audit(*words, "--count", 3).output
    assert "at least 3 images in two.npz, got 2; give a smaller --batch" in audit(*words, "--batch-size", 3).output


def test_a_file_of_other_arrays_is_said_to_hold_them(mine, tmp_path):
    np.savez(tmp_path / "xy.npz", x=np.zeros(2), y=np.zeros(2))
    result = audit(f"{mine}:gray", "--images", "xy.npz")
    assert result.exit_code == terminal.USAGE
    assert result.output == "error: expected arrays images and labels in xy.npz, got no images or labels but 'x', 'y'\n"
    (tmp_path / "damaged.npz").write_text("no file of arrays")
    assert "expected a .npz file without objects" in audit(f"{mine}:gray", "--images", "damaged.npz").output


@pytest.mark.parametrize("own", [True, False])
def test_a_list_of_defenses_is_a_chain(mine, own):
    words = ((f"{mine}:whole", "--count", 1) if own else METHOD) + ("--attack", "guess", "--json")
    short, long = (
        audit(*words, "--defense", chain)
        for chain in ("[prune, {name: clip, max_norm: 1}]", "{name: chain, parts: [prune, {name: clip, max_norm: 1}]}")
    )
    assert short.exit_code == 0, short.output
    assert json.loads(short.stdout) == json.loads(long.stdout)
    assert "did you mean 'prune'" in audit(*words, "--defense", "[prun]").output


def test_a_table_under_another_loss_is_audited_on_the_command_line(mine, tmp_path):
    words = (f"{mine}:table", "--loss", "bce", "--input-range=-3,3", "--attack", "analytic")
    result = audit(*words, "--json", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["findings"][0]
    (row,) = found["images"]
    assert row["row_accuracy"] == row["exact_match"] == found["exact_match_rate"] == 1
    report = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "How much of a table" in report
    assert "exact match rate" in report
    assert row["label_correct"] is True
    assert row["target"] == [1.0]
    assert "100 % of its columns right" in audit(*words).stdout
    other = audit(*words[:4], "--loss", "mse", *words[4:], "--out", tmp_path / "out")
    assert other.exit_code == terminal.USAGE  # another audit than the folder's
    assert "give loss='bce'" in audit(words[0], *words[3:]).stderr


def test_an_output_and_a_head_are_named_on_the_command_line(mine):
    words = (f"{mine}:named", "--attack", "{name: ig, iterations: 3}")
    said = audit(*words).stderr
    assert "dict of 'maps' (1, 3, 6, 6), 'scores' (1, 3)" in said
    assert "(--output)" in said
    assert "give head='its.prefix.' (--head)" in audit(*words, "--output", "scores").stderr
    result = audit(*words, "--output", "scores", "--head", "head.")
    assert result.exit_code in {0, terminal.UNDECIDED}, result.output
    assert "image 0: PSNR" in result.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--input-range", "3"), "expected --input-range as low,high"),
        (("--categories", "3-7"), "expected --categories as first:last+1"),
        (("--loss", "bcee"), "unknown loss 'bcee'; did you mean 'bce'"),
    ],
)
def test_what_inputs_and_losses_are_not_is_said_by_the_option(mine, words, said):
    result = audit(f"{mine}:table", *words)
    assert result.exit_code == terminal.USAGE
    assert said in result.stderr
