"""JUnit XML of an audit: what becomes of each attack on each update, in the elements that parsers know."""

from datetime import UTC, datetime
from xml.etree import ElementTree

import pytest
from support.judged import everything, finding, row

from eval.audit.findings import AttackFinding, AuditReport
from eval.audit.judgment import Judgment
from eval.audit.junit import MOST_IMAGES, junit_xml

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
TEXT = {"failure": {"message", "type"}, "error": {"message", "type"}, "skipped": {"message", "type"}}
ATTRIBUTES = {
    "testsuites": {"name", "tests", "failures", "errors"},
    "testsuite": {"name", "tests", "failures", "errors", "skipped", "timestamp"},
    "properties": set(),
    "property": {"name", "value"},
    "testcase": {"classname", "name"},
    "system-out": set(),
    **TEXT,
}
"""Attributes that the schema of Jenkins' xUnit plugin (junit-10.xsd) allows, as far as we write them."""
CHILDREN = {
    "testsuites": {"testsuite"},
    "testsuite": {"properties", "testcase", "system-out"},
    "properties": {"property"},
    "testcase": {"system-out", *TEXT},
}


def written(judgment):
    """The test cases by name, and the whole tree, which is checked."""
    text = junit_xml(judgment, version="1.2", at=NOON)
    assert text.isascii()
    root = ElementTree.fromstring(text.encode())
    for element in root.iter():
        assert {*element.attrib} <= ATTRIBUTES[element.tag]
        assert {child.tag for child in element} <= CHILDREN.get(element.tag, set())
        if element.tag in TEXT:
            assert element.get("message")
            assert element.text.startswith(element.get("message"))
    (suite,) = root
    cases = [*suite.iter("testcase")]
    for kind, counted in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        assert int(suite.get(counted)) == sum(case.find(kind) is not None for case in cases)
    assert int(root.get("tests")) == int(suite.get("tests")) == len(cases)
    named = {case.get("name"): case for case in cases}
    assert len(named) == len(cases), "GitLab keeps the first of a name"
    return named, suite


def status(case):
    """The tag of what a case came to, and its type."""
    return next(((child.tag, child.get("type")) for child in case if child.tag in TEXT), ("passed", None))


def test_every_attack_has_a_case_for_every_update():
    named, suite = written(everything())
    ends = {name: status(case) for name, case in named.items()}
    assert ends == {
        "the audit is decided": ("passed", None),  # an image leaked: that is an answer
        "exact on update 0": ("failure", "image-leak"),
        "exact on update 1": ("passed", None),
        "blindly on update 0": ("failure", "confirmed-reconstruction"),
        "blindly on update 1": ("skipped", None),
        "behind on update 0": ("skipped", None),
        "behind on update 1": ("skipped", None),
        "narrow on update 0": ("skipped", None),
        "narrow on update 1": ("skipped", None),
        "peel on update 0": ("failure", "private-tensor"),
        "peel on update 1": ("passed", None),
        "crash on update 0": ("error", "attack-failed"),
        "crash on update 1": ("error", "attack-failed"),
        "idle on update 0": ("skipped", None),
        "idle on update 1": ("skipped", None),
        "late on update 0": ("skipped", None),
        "late on update 1": ("skipped", None),
    }
    assert named["exact on update 0"].get("classname") == "hyperleak.exact"
    failure = named["exact on update 0"].find("failure")
    assert failure.get("message") == "image content leaked: image 0 at 60 dB (best guess 11 dB)"
    assert failure.text.endswith("\nimage 0: PSNR 60.0 dB (best guess 11.0 dB)")
    assert named["behind on update 0"].find("skipped").get("message") == "not applicable: there is noise"
    assert "a limit of the attack" in named["narrow on update 0"].find("skipped").get("message")
    assert "the search gave up: a layer <of> its {own}" in named["narrow on update 1"].find("skipped").get("message")
    assert "the true images are not known" in named["blindly on update 1"].find("skipped").get("message")
    assert named["late on update 1"].find("skipped").get("message") == "not tried: the time limit came before it"
    assert suite.get("timestamp") == "2026-01-02T12:00:00+00:00"
    assert suite.find("system-out").text.startswith("note: a note\nexact: exact says so\n")


def test_characters_that_xml_has_not_are_shown():
    named, suite = written(everything())
    assert suite.get("name") == "mine:build <&> \\x1b"
    assert named["crash on update 0"].find("error").get("message") == "expected rain \\x00 got \\ud800 sun"


def test_with_limits_only_they_fail():
    named, suite = written(everything(limits={"psnr": 20.0}))
    failed = {name: status(case)[1] for name, case in named.items() if status(case)[0] == "failure"}
    assert failed == {"exact on update 0": "limit-exceeded"}
    words = named["exact on update 0"].find("failure").get("message")
    assert words == "PSNR above 20: image 0 at 60 dB (best guess 11 dB)"
    assert [one.get("value") for one in suite.iter("property") if one.get("name") == "max-psnr"] == ["20"]
    flat = Judgment(AuditReport("mine", [finding("exact", [row(psnr=60.0, guess=49.0)], ("ran",))]), {"psnr": 20.0})
    words = written(flat)[0]["exact on update 0"].find("failure").get("message")
    assert words.endswith("image 0 at 60 dB (best guess 49 dB), and the best guess alone exceeds it for 1 of 1")
    named, _ = written(everything(limits={"psnr": 60.0}))  # the limit itself is allowed
    assert "failure" not in {status(case)[0] for name, case in named.items() if name != "the audit is decided"}


def test_what_is_not_decided_is_a_failure_of_its_own():
    judgment = Judgment(AuditReport("mine", [finding("narrow", kinds=("limit",), words="too wide")]), {"psnr": 20.0})
    named, _ = written(judgment)
    failure = named["the audit is decided"].find("failure")
    assert failure.get("type") == "not-decided"
    assert len(failure.text.splitlines()) >= len(judgment.undecided) > 1
    assert "To decide it: " in failure.get("message")


def test_what_only_all_updates_show_has_a_case_of_its_own():
    rows = [row(update, psnr=14.0 + update / 10, guess=11.0) for update in range(8)]
    judgment = Judgment(AuditReport("mine", [finding("mean", rows, ("ran",) * 8)]))
    assert judgment.report.findings[0].leaked
    named, _ = written(judgment)
    failed = {name: status(case) for name, case in named.items() if status(case)[0] == "failure"}
    assert failed == {"mean on all updates together": ("failure", "image-leak")}
    alone = Judgment(AuditReport("mine", [finding("mean", [{**one, "update": 0} for one in rows], ("ran",))]))
    assert status(written(alone)[0]["mean on update 0"]) == ("failure", "image-leak")


def test_updates_of_a_training_are_named_by_round_and_seed():
    rows = [row("0:106", seed=3, round=2)]
    found = finding("guess", rows)
    outcomes = [type(one)("guess", (3, 2, "0:106"), one.kind) for one in finding("guess", kinds=("ran",)).outcomes]
    judgment = Judgment(AuditReport("fedavg", [AttackFinding("guess", found.rows, "", "no", outcomes=outcomes)]))
    assert "guess on update 0:106 of round 2, seed 3" in written(judgment)[0]


def test_a_training_that_failed_is_an_error_and_a_stop_is_one():
    judgment = Judgment(AuditReport("fedavg", [AttackFinding.from_failure("fedavg, seed 0", "no memory", "", None)]))
    assert status(written(judgment)[0]["fedavg, seed 0"]) == ("error", "attack-failed")
    named, _ = written(everything(stopped="late"))
    assert status(named["the audit is whole"]) == ("error", "stopped")
    assert status(written(Judgment(AuditReport("x", [], stopped="the end")))[0]["the audit is whole"])[0] == "error"


def test_an_update_that_was_settled_before_is_skipped():
    settled = finding("first", [row(0, psnr=60.0), row(1)], ("settled", "ran"))
    second = finding("second", [row(1)], (), spared="of the 1 update(s) that no attack before it settled")
    outcome = type(settled.outcomes[0])("second", 1, "ran")
    judgment = Judgment(AuditReport("mine", [settled, type(second)(**{**vars(second), "outcomes": [outcome]})]))
    named, _ = written(judgment)
    assert status(named["second on update 0"]) == ("skipped", None)
    assert "an attack before it settles this update" in named["second on update 0"].find("skipped").text
    assert status(named["second on update 1"]) == ("passed", None)


def test_a_search_that_was_cut_short_passes_nothing():
    rows = [row(0, psnr=60.0), row(1)]
    judgment = Judgment(AuditReport("mine", [finding("slow", rows, ("searched", "searched"), cut_short="no time")]))
    named, _ = written(judgment)
    assert status(named["slow on update 0"]) == ("failure", "image-leak")
    assert named["slow on update 1"].find("skipped").get("message") == "not decided: cut short: no time"


def test_many_images_are_cut():
    rows = [row(0, image, psnr=60.0) for image in range(MOST_IMAGES + 5)]
    named, _ = written(Judgment(AuditReport("mine", [finding("exact", rows, ("settled",))])))
    failure = named["exact on update 0"].find("failure")
    assert failure.text.endswith("\nand 5 more")
    assert "characters left out" in failure.get("message")


@pytest.mark.parametrize("limits", [{}, {"psnr": 20.0}, {"psnr": 90.0}])
def test_failures_are_the_violations(limits):
    judgment = everything(limits=limits)
    named, _ = written(judgment)
    failed = [name for name, case in named.items() if status(case)[0] == "failure" and " on " in name]
    assert failed == [f"{leak.attack} on update {leak.update}" for leak in judgment.violations]
    assert bool(failed) is (not limits or bool(judgment.above))
