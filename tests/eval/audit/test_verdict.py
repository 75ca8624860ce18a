"""Audits say that images leaked where reports do."""

import json

import pytest
from support.fakerun import CONFIG, FakeRun
from support.reports import blocks

from eval.audit.findings import verdict
from eval.audit.verdict import image_verdict
from eval.report.assemble import build_report
from eval.report.blocks import FindingBlock
from eval.report.load import load
from eval.report.sections.overview import facts


@pytest.mark.parametrize(
    ("psnr", "further", "word"),
    [
        ([18.0] * 6, {}, "image content leaked: +"),
        ([18.0] * 5, {}, "too few images to tell content from chance"),
        ([24.0, 2.0, 3.0], {}, "image content leaked: 1 of 3 image(s) came back at 20 dB or more"),
        ([19.0, 2.0, 3.0], {}, "too few images to tell content from chance"),
        ([2.0] * 6, {}, "no image content shown to leak"),
        ([19.0] + [2.0] * 6, {}, "no image content shown to leak"),
        (
            [5.0] * 4,
            {"identified": True, "identified_among": 50},
            "identity of images leaked, not their content: 4 of 4",
        ),
        ([5.0] * 4, {"identified": False, "identified_among": 50}, "no image content shown to leak"),
    ],
)
def test_an_audit_has_the_bar_of_the_report(tmp_path, psnr, further, word):
    made = FakeRun().attack("fedavg", "ig", psnr, label_correct=None, **further)
    folder = made.write(tmp_path / "out")
    rows = [json.loads(line) for line in (folder / "images.jsonl").read_text().splitlines()]
    said = image_verdict(rows)
    assert said.startswith(word)
    (found,) = blocks(build_report(folder), FindingBlock)
    assert ("leaked" in said.partition(":")[0]) is found.leaks
    assert said.startswith("image content leaked") is (found.leaked == ["pictures"])


def test_only_the_identity_of_pictures_is_said_to_leak_where_they_are_only_named(tmp_path):
    made = FakeRun().attack("fedavg", "ig", [5.0] * 4, label_correct=None, identified=True, identified_among=50)
    (found,) = blocks(build_report(made.write(tmp_path / "out")), FindingBlock)
    assert found.verdict == "shown to leak: identity of pictures"


def test_more_attacks_raise_the_bar_for_names(tmp_path):
    made = FakeRun().attack("fedavg", "ig", [5.0, 5.0], label_correct=None, identified=True, identified_among=8)
    folder = made.write(tmp_path / "out")
    rows = [json.loads(line) for line in (folder / "images.jsonl").read_text().splitlines()]
    assert image_verdict(rows).startswith("identity of images leaked")
    assert not image_verdict(rows, tests=20).startswith("identity of images leaked")


def test_nothing_is_said_without_images():
    assert image_verdict([]) == ""


def test_a_choice_of_classes_stands_beside_the_number_of_images(tmp_path):
    for chosen, words in (("[]", "2, 1 per update"), ("[face]", "2, 1 per update, only of face")):
        made = FakeRun(CONFIG.replace("batch_size: 1,", f"batch_size: 1, classes: {chosen},")).attack(
            "fedavg", "ig", [5.0, 5.0]
        )
        folder = made.write(tmp_path / chosen.strip("[]"))
        assert dict(facts(load(folder)))["Images"] == words


def test_one_recovered_secret_of_many_leaks():
    """Most updates keep the embedding; a missing value is none recovered, and rows of one update count once."""
    errors = ({"embedding": 1e-3}, {"embedding": 1e-3}, {"embedding": 2.0}, {}, {"embedding": None})
    rows = [
        {"attack": "peel", "update": number, "private_errors": error, "missing": {}, "verified": None}
        for number, error in zip((0, 0, 1, 2, 3), errors, strict=True)
    ]
    said = verdict(rows)
    assert said == "private embedding leaked: recovered for 1 of 4 update(s) (relative error below 0.1, at best 1e-03)"
    assert verdict(rows[2:]) == (
        "private embedding recovered for 0 of 3 update(s) (relative error below 0.1, at best 2e+00)"
    )
