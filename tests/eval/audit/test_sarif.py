"""SARIF of an audit: rules, levels, places and what tells results apart, as the standard and GitHub ask for it."""

import copy
import os
import sys
import types
from pathlib import Path

import pytest
from support import sarif_rules
from support.judged import everything, finding, row

from attacks.base import Remark
from eval.audit import source_place
from eval.audit.findings import AttackFinding, AuditReport
from eval.audit.judgment import Judgment
from eval.audit.sarif import RULES, sarif_log
from eval.audit.source_place import MODULES, ROOT, SourcePlace, place_of, place_of_target
from eval.audit.verdict import unscored_verdict
from eval.report.sections.inconclusive import outcomes_of_rows
from fl.methods.fedavg import FedAvg

PLACE = SourcePlace("src/my%20model.py", ROOT, 8, 12, "my_model.build")


def log_of(judgment, place=PLACE, code=0):
    told = sarif_log(judgment, place, version="1.2", exit_code=code)
    assert not sarif_rules.faults(told)
    assert not sarif_rules.references(told)
    return told


def results(judgment):
    (run,) = log_of(judgment)["runs"]
    return run["results"]


def test_what_leaked_is_an_error_at_the_code():
    found = results(everything())
    assert [(one["ruleId"], one["level"], one["properties"]) for one in found] == [
        ("image-leak", "error", {"attack": "exact", "update": 0}),
        ("confirmed-reconstruction", "error", {"attack": "blindly", "update": 0}),
        ("private-tensor", "error", {"attack": "peel", "update": 0}),
    ]
    assert found[0]["message"]["text"] == (
        "exact on update 0: image content leaked: image 0 at 60 dB (best guess 11 dB)"
    )
    (place,) = found[0]["locations"]
    assert place["physicalLocation"] == {
        "artifactLocation": {"uri": "src/my%20model.py", "uriBaseId": ROOT},
        "region": {"startLine": 8, "startColumn": 1, "endLine": 8, "endColumn": 13},
    }


def test_what_limits_allow_is_a_note():
    found = results(everything(limits={"psnr": 20.0}))
    assert {(one["ruleId"], one["level"]) for one in found} == {
        ("limit-exceeded", "error"),
        ("confirmed-reconstruction", "note"),
        ("private-tensor", "note"),
    }
    allowed = next(one for one in results(everything(limits={"psnr": 90.0})) if one["ruleId"] == "image-leak")
    assert allowed["level"] == "note"
    assert "(no limit is exceeded)" in allowed["message"]["text"]


def test_what_is_open_is_a_warning_with_its_remedy():
    report = AuditReport("mine", [finding("narrow", kinds=("limit",), words="a layer {of} its own")])
    judgment = Judgment(report)
    found = results(judgment)
    assert [(one["ruleId"], one["level"]) for one in found] == [("not-decided", "warning")] * len(judgment.undecided)
    assert "To decide it: " in found[0]["message"]["text"]
    assert "a layer {{of}} its own" in found[0]["message"]["text"]  # a single brace would be a placeholder


def test_nothing_found_is_an_empty_list():
    judgment = Judgment(AuditReport("mine", [finding("exact", [row()], ("ran",))]), {"psnr": 20.0})
    assert results(judgment) == []


def test_a_failed_attack_and_a_stop_are_notifications():
    (run,) = log_of(everything(stopped="late"), code=130)["runs"]
    (called,) = run["invocations"]
    assert called["exitCode"] == 130
    assert not called["executionSuccessful"]
    assert [one["descriptor"]["id"] for one in called["toolExecutionNotifications"]] == ["attack-failed", "stopped"]
    assert called["toolExecutionNotifications"][0]["message"]["text"] == (
        "crash failed: expected rain \\x00 got \\ud800 sun"
    )


def test_results_are_told_apart_and_known_again():
    def marks(judgment):
        return [one["partialFingerprints"]["primaryLocationLineHash"] for one in results(judgment)]

    rows = [row(update, psnr=60.0 + update) for update in range(3)]
    judgment = Judgment(AuditReport("mine", [finding("exact", rows, ("settled",) * 3)]))
    first = marks(judgment)
    closer = [{**one, "psnr": 70.0} for one in rows]
    assert len({*first}) == 3
    assert first == marks(Judgment(AuditReport("mine", [finding("exact", closer, ("settled",) * 3)])))
    assert first != marks(Judgment(AuditReport("other", [finding("exact", rows, ("settled",) * 3)])))


def test_what_an_update_bears_out_leaks_where_nobody_gave_the_true_images():
    (leak,) = Judgment(AuditReport("mine", [finding("blindly", kinds=("borne out",), words="to float16")])).violations
    assert (leak.rule, leak.update) == ("confirmed-reconstruction", 0)
    assert "if not to a quarter of a level: to float16" in leak.words


def test_what_may_be_a_mixture_is_said_to_leak_if_it_is_of_as_many_examples_as_stated():
    row = {"update": 0, "images": 1, "candidates": 1, "verified": None, "approximate": True}
    row["remarks"] = [Remark.MAY_BE_MIXTURE]
    report = AuditReport("mine", [AttackFinding("exact", [], "", "", outcomes=outcomes_of_rows("exact", [row]))])
    (leak,) = Judgment(report).violations
    for words in (leak.words, unscored_verdict([row])):
        assert "the update bears out what the attack recovered, if it is of as many examples as stated" in words
        assert "quarter of a level" not in words


def test_audits_of_other_subjects_do_not_replace_each_other():
    names = ["mine:build under fedavg, 1 image per update", "mine:build under fedavg, 8 images per update"]
    ids = [log_of(Judgment(AuditReport(name, [])))["runs"][0]["automationDetails"]["id"] for name in names]
    assert len({*ids}) == 2
    assert all(one.startswith("hyperleak/") and one.endswith("/") and one.count("/") == 2 for one in ids)


def test_every_kind_of_leak_has_a_rule():
    assert {leak.rule for leak in [*everything().leaks, *everything(limits={"psnr": 20.0}).leaks]} <= {
        rule.id for rule in RULES
    }
    assert len({rule.id for rule in RULES}) == len(RULES) == 5


@pytest.mark.parametrize(
    "change",
    [
        lambda log: log.pop("runs"),
        lambda log: log["runs"][0]["tool"].pop("driver"),
        lambda log: log["runs"][0]["results"][0].pop("message"),
        lambda log: log["runs"][0]["results"][0].update(level="high"),
        lambda log: log["runs"][0]["results"][0].update(message={"text": "a {placeholder}"}),
        lambda log: log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["region"].update(startLine=0),
        lambda log: log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"].update(
            uri="/home/me/x.py"
        ),
        lambda log: log["runs"][0]["invocations"][0].update(color="red"),
    ],
)
def test_the_rules_of_the_standard_can_be_broken(change):
    broken = copy.deepcopy(log_of(everything()))
    change(broken)
    assert sarif_rules.faults(broken)


@pytest.mark.parametrize(
    "change",
    [
        lambda run: run["results"][0].update(ruleIndex=0),
        lambda run: run["results"][0].update(locations=[]),
        lambda run: run["results"].append(run["results"][0]),
        lambda run: run["tool"]["driver"]["rules"][0].pop("help"),
        lambda run: run["invocations"][0].update(executionSuccessful=True),
    ],
)
def test_parts_that_do_not_fit_are_found(change):
    broken = copy.deepcopy(log_of(everything()))
    change(broken["runs"][0])
    assert sarif_rules.references(broken)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with a model in a package, from a folder within."""
    package = tmp_path / "repo" / "src" / f"nets {tmp_path.name}".replace(" ", "_").replace("-", "_")
    package.mkdir(parents=True)
    (tmp_path / "repo" / ".git").write_text("gitdir: elsewhere")  # as in a worktree
    (package / "__init__.py").write_text("")
    (package / "mine.py").write_text(
        "import functools\n\n\n@functools.cache\ndef build():\n    return 3\n\n\nmodel = build()\n"
    )
    monkeypatch.chdir(tmp_path / "repo" / "src")
    monkeypatch.syspath_prepend(str(tmp_path / "repo" / "src"))
    yield f"{package.name}.mine"
    for name in (package.name, f"{package.name}.mine"):
        sys.modules.pop(name, None)


def test_a_model_of_ones_own_stands_below_the_root_of_the_repository(repository):
    __import__(repository)
    found = place_of_target(f"{repository}:model")
    assert found.uri == f"src/{repository.replace('.', '/')}.py"
    assert (found.base, found.line, found.width, found.name) == (ROOT, 1, 0, f"{repository}.model")
    place = place_of(sys.modules[repository].build.__wrapped__, repository, "build")
    assert (place.line, place.width) == (4, len("@functools.cache"))
    assert str(Path.cwd()) not in str(found)


def test_a_file_with_an_odd_name_has_a_uri(tmp_path, monkeypatch):
    odd = types.ModuleType("odd")
    odd.__file__ = os.fsdecode(os.fsencode(tmp_path) + b"/m\xff y.py")
    monkeypatch.setitem(sys.modules, "odd", odd)
    monkeypatch.chdir(tmp_path)
    found = place_of(None, "odd", "x")
    assert found.uri == "m%FF%20y.py"
    log_of(everything(), found)


def test_a_method_of_ours_stands_where_python_finds_it():
    found = place_of(FedAvg, FedAvg.__module__, FedAvg.__qualname__)
    assert (found.uri, found.base) == ("fl/methods/fedavg.py", MODULES)
    source = (Path(source_place.__file__).parents[2] / found.uri).read_text().splitlines()
    assert len(source[found.line - 1]) == found.width
    assert source[found.line - 1] == '@methods.register("fedavg")'


def test_a_module_that_is_a_package_keeps_its_own_name():
    assert place_of(None, "fl.methods", "x").uri == "fl/methods/__init__.py"
    assert place_of(None, "no_such.module", "x").uri == "no_such/module.py"
    assert place_of(os.path.join, "os.path", "join").base == MODULES
