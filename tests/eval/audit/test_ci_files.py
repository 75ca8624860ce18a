"""`--junit` and `--sarif`: written by audits of all three kinds, checked before anything runs, codes as they are."""

import json
from xml.etree import ElementTree

import numpy as np
import pytest
from support import sarif_rules
from support.audit_command import PERCEPTRON, audit, written
from support.tiny import Crash, Registered
from typer.testing import CliRunner

from eval import cli
from eval.audit.ci_files import CIFiles
from eval.commands import terminal
from eval.experiment import plugins
from fl.capture import from_batch

MODULE = f"""{PERCEPTRON}
def whole():
    return build(), torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1])
"""
METHOD = ("method", "fedavg", "--dataset", "{name: faces, size: 8}", "--model", "tiny", "--count", 2)
FILES = ("--junit", "ci/found.xml", "--sarif", "ci/found.sarif")


@pytest.fixture(autouse=True)
def mine(monkeypatch, tmp_path):
    assert plugins  # names of the tests' own attacks are looked up in the registry, not read off the source
    name = written(monkeypatch, tmp_path, "ci", MODULE)
    with Registered():
        yield name


def captured(mine):
    """An update of one image, and where it lies."""
    model, images, labels = __import__(mine).whole()
    view, _ = from_batch(model, images[:1], labels[:1])
    np.savez("update.npz", **{name: value.numpy() for name, value in view.update.items()})
    return "update", "update.npz", "--model", f"{mine}:build", "--input-shape", "1,8,8"


def read(folder):
    """The status of every test case, and the SARIF run, which is checked."""
    root = ElementTree.parse(folder / "ci" / "found.xml").getroot()
    cases = {case.get("name"): {child.tag for child in case} - {"system-out"} for case in root.iter("testcase")}
    ends = {name: next(iter(tags), "passed") for name, tags in cases.items()}
    log = json.loads((folder / "ci" / "found.sarif").read_text())
    assert not sarif_rules.faults(log)
    assert not sarif_rules.references(log)
    return ends, log["runs"][0]


def test_files_for_ci_have_a_case_for_each_attack_on_a_model(mine, tmp_path):
    result = audit("model", f"{mine}:whole", "--attack", "analytic", *FILES)
    assert result.exit_code == 0, result.output  # without a limit a leak is told, and is no failure of the command
    ends, run = read(tmp_path)
    assert ends == {
        "the audit is decided": "passed",
        "analytic on update 0": "failure",
        "analytic on update 1": "failure",
    }
    assert [one["ruleId"] for one in run["results"]] == ["image-leak"] * 2
    place = run["results"][0]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": f"{mine}.py", "uriBaseId": "%SRCROOT%"}
    lines = (tmp_path / f"{mine}.py").read_text().splitlines()
    assert lines[place["region"]["startLine"] - 1] == "def whole():"
    assert run["invocations"][0]["exitCode"] == 0
    assert str(tmp_path) not in (tmp_path / "ci" / "found.sarif").read_text()


def test_a_model_above_a_limit(mine, tmp_path):
    words = ("--attack", "crash", "--attack", "analytic", "--max-psnr", 20, "--json", *FILES)
    result = audit("model", f"{mine}:whole", *words)
    assert result.exit_code == terminal.LEAKED, result.output
    ends, run = read(tmp_path)
    assert {name: end for name, end in ends.items() if name.startswith("crash")} == dict.fromkeys(
        ("crash on update 0", "crash on update 1"), "error"
    )
    assert {one["ruleId"] for one in run["results"]} == {"limit-exceeded"}
    assert run["invocations"][0]["exitCode"] == terminal.LEAKED
    leaks = json.loads(result.stdout)["leaks"]
    assert [one["words"] in result["message"]["text"] for one, result in zip(leaks, run["results"], strict=True)] == [
        True,
        True,
    ]


def test_files_for_ci_have_a_case_for_each_attack_on_a_captured_update(mine, tmp_path):
    words = captured(mine)
    result = audit(*words, "--attack", "analytic", *FILES)
    assert result.exit_code == 0, result.output
    ends, run = read(tmp_path)
    assert ends == {"the audit is decided": "passed", "analytic on update 0": "failure"}
    assert [one["ruleId"] for one in run["results"]] == ["confirmed-reconstruction"]
    assert run["results"][0]["locations"][0]["logicalLocations"] == [{"fullyQualifiedName": f"{mine}.build"}]
    blind = audit(*words, "--attack", "guess", *FILES)
    assert blind.exit_code == terminal.UNDECIDED
    ends, run = read(tmp_path)
    assert ends == {"the audit is decided": "failure", "guess on update 0": "skipped"}
    assert {one["ruleId"] for one in run["results"]} == {"not-decided"}


def test_files_for_ci_pass_or_skip_attacks_on_a_method(tmp_path):
    for attack, code, end in (("guess", 0, "passed"), ("refuse", terminal.UNDECIDED, "skipped")):
        result = audit(*METHOD, "--attack", attack, *FILES, "--max-psnr", 90)
        assert result.exit_code == code, result.output
        ends, run = read(tmp_path)
        decided = ends.pop("the audit is decided")
        assert decided == ("failure" if code else "passed")
        assert [*ends.values()] == [end, end]
        assert all(" of round 0, seed 0" in name for name in ends)
        places = [one["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for one in run["results"]]
        assert {*places} == ({"fl/methods/fedavg.py"} if code else set())


def pressed(*_):
    raise KeyboardInterrupt


def test_what_was_found_before_a_stop_is_written(mine, tmp_path, monkeypatch):
    monkeypatch.setattr(Crash, "attack_view", pressed)
    words = ("--attack", "analytic", "--attack", "crash", "--attack", "guess", *FILES)
    result = audit("model", f"{mine}:whole", *words)
    assert result.exit_code == terminal.STOPPED, result.output
    ends, run = read(tmp_path)
    assert ends.pop("the audit is whole") == "error"
    assert ends.pop("the audit is decided") == "passed"  # what leaked is an answer
    assert {name.split()[0] for name in ends} == {"analytic"}
    assert {*ends.values()} == {"failure"}
    assert run["invocations"][0]["exitCode"] == terminal.STOPPED
    assert [one["descriptor"]["id"] for one in run["invocations"][0]["toolExecutionNotifications"]] == ["stopped"]
    assert len(run["results"]) == 2


def test_one_file_alone_and_none(mine, tmp_path):
    assert audit("model", f"{mine}:whole", "--attack", "guess", "--junit", "a.xml").exit_code == 0
    assert (tmp_path / "a.xml").is_file()
    assert not list(tmp_path.rglob("*.sarif"))
    assert audit("model", f"{mine}:whole", "--attack", "guess", "--sarif", "b.sarif.json").exit_code == 0
    assert json.loads((tmp_path / "b.sarif.json").read_text())["version"] == "2.1.0"


def test_beside_the_report_the_audit_goes_on(mine, tmp_path):
    words = ("--out", "ci", "--attack", "refuse", *FILES)
    for _ in range(2):
        assert audit("model", f"{mine}:whole", *words).exit_code == terminal.UNDECIDED
        read(tmp_path)
    assert CliRunner().invoke(cli.app, ["doctor", "ci"]).exit_code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--junit", "one.xml", "--sarif", "./one.xml"),
            "expected --junit and --sarif as two files, got one.xml for both",
        ),
        (("--junit", "report.html"), "expected --junit as a file whose name ends with .xml, got report.html"),
        (("--junit", ".xml"), "a file whose name ends with .xml"),
        (("--junit", "/dev/stdout"), "a file whose name ends with .xml"),
        (
            ("--sarif", "run.json"),
            "expected --sarif as a file whose name ends with .sarif or .sarif.json, got run.json",
        ),
        (("--junit", "folder.xml"), "expected --junit as a file, got the folder or device folder.xml"),
        (("--sarif", "link/to.sarif"), "expected --sarif as a file that can be written, got link/to.sarif"),
        (
            ("--sarif", "text.txt/below.sarif"),
            "expected --sarif as a file that can be written, got text.txt/below.sarif",
        ),
        (("--junit", f"{'x' * 300}.xml"), "File name too long"),
    ],
)
def test_what_is_asked_for_wrongly_is_said_before_anything_runs(mine, tmp_path, words, said, monkeypatch):
    monkeypatch.setattr(Crash, "attack_view", lambda *_: pytest.fail("the audit ran"))
    (tmp_path / "folder.xml").mkdir()
    (tmp_path / "text.txt").write_text("mine")
    (tmp_path / "link").symlink_to("/proc/self/nowhere")
    result = audit("model", f"{mine}:whole", "--attack", "crash", "--out", "kept", *words)
    assert result.exit_code == terminal.USAGE, result.output
    assert said in result.output
    assert result.output.count("\n") == 1
    assert not (tmp_path / "kept").exists()
    assert (tmp_path / "text.txt").read_text() == "mine"


def test_a_file_of_an_earlier_audit_is_not_taken_for_this_ones(mine, tmp_path):
    (tmp_path / "ci").mkdir()
    for name in ("found.xml", "found.sarif"):
        (tmp_path / "ci" / name).write_text("of yesterday")
    assert audit("model", f"{mine}:no_such", *FILES).exit_code == terminal.USAGE
    assert not list((tmp_path / "ci").iterdir())


def test_a_link_is_replaced_and_what_it_leads_to_stays(mine, tmp_path):
    (tmp_path / "precious.xml").write_text("mine")
    (tmp_path / "link.xml").symlink_to("precious.xml")
    assert audit("model", f"{mine}:whole", "--attack", "guess", "--junit", "link.xml").exit_code == 0
    assert (tmp_path / "precious.xml").read_text() == "mine"
    assert not (tmp_path / "link.xml").is_symlink()


@pytest.mark.parametrize(("limit", "code"), [(90, terminal.FAILURE), (1, terminal.LEAKED)])
def test_a_full_disk_is_said_and_hides_no_leak(mine, monkeypatch, limit, code):
    def full(*_):
        raise OSError(28, "No space left on device", "found.xml")

    monkeypatch.setattr(CIFiles, "write", full)
    result = audit("model", f"{mine}:whole", "--attack", "guess", "--max-psnr", limit, *FILES)
    assert result.exit_code == code, result.output
    assert "error: the findings could not be written: " in result.stderr
    assert "No space left" in result.stderr
    assert "guess: " in result.stdout


def test_a_model_that_is_an_object_stands_in_its_module(mine, tmp_path):
    (tmp_path / f"{mine}.py").write_text(MODULE + "\nmodel = build()\n")
    np.savez("data.npz", images=np.zeros((2, 8, 8), np.uint8), labels=np.arange(2))
    result = audit("model", f"{mine}:model", "--images", "data.npz", "--attack", "refuse", *FILES)
    assert result.exit_code == terminal.UNDECIDED, result.output
    _, run = read(tmp_path)
    region = run["results"][0]["locations"][0]["physicalLocation"]["region"]
    assert (region["startLine"], region["endColumn"]) == (1, 1)
