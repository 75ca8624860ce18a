"""What attacks show of their own results, in rows and in words."""

from types import SimpleNamespace

import pytest
import torch

from attacks.base import Reconstruction
from eval.audit.findings import report_from_rows
from eval.audit.leakage_words import leakage
from eval.metrics.score import score
from eval.metrics.self_verification import add_self_check_columns, attack_notes, verification_words
from fl.seeds import stream
from fl.view import ThreatModel


@pytest.fixture
def truth():
    images = torch.rand(2, 1, 8, 8, generator=stream(0, "images"))
    return SimpleNamespace(inputs=images, labels=torch.tensor([0, 1]), private={"v": torch.ones(3)}, extractor={})


def test_words_for_what_an_attack_shows():
    assert verification_words(None) == ""
    assert verification_words(True, 1.0) == "confirmed by the attack"
    assert verification_words(False) == "not confirmed by the attack"
    assert verification_words(False, 0.973) == "97.3 % of pixels confirmed by the attack"
    assert verification_words(False, 0.99999) == "99.9 % of pixels confirmed by the attack"
    assert verification_words(False, 1.0) == "100 % of pixels confirmed by the attack"


def test_the_share_of_fixed_pixels_goes_with_the_image_it_is_of(truth):
    fixed = torch.ones(2, 1, 8, 8, dtype=torch.bool)
    fixed[0, 0, 0, :4] = False
    swapped = Reconstruction(truth.inputs.flip(0), verified=False, fixed=fixed, note="conv1: two cells open")
    rows = add_self_check_columns(swapped, score(swapped, truth))
    assert [row["fixed"] for row in rows] == [1.0, 0.9375]
    assert attack_notes(rows) == ["of images 0 and 1 the attack says: conv1: two cells open"]
    assert attack_notes([{**rows[0], "note": ""}, rows[1]]) == ["of image 1 the attack says: conv1: two cells open"]
    lines = leakage(swapped, truth).splitlines()
    assert lines[1].endswith("exact to 8 bits, 93.8 % of pixels confirmed by the attack")
    named = [{**row, "attack": "cascade", "update": 0, "picture": str(row["image"])} for row in rows]
    (finding,) = report_from_rows("x", named, threat=ThreatModel(), defended=False).findings
    assert finding.notes == attack_notes(rows)
    assert "fixed" not in add_self_check_columns(Reconstruction(None), score(Reconstruction(None), truth))[0]


def test_what_came_back_without_an_image_is_named(truth):
    features = Reconstruction(None, torch.tensor([0, 0]), private={"features": torch.ones(2, 3)}, verified=True)
    assert leakage(features, truth) == (
        "the attack recovered no images, only features (the input of a layer behind the first), of which there is no "
        "true value to compare with; 1 of 2 label(s) recovered; confirmed by the attack"
    )
    private = Reconstruction(None, private={"v": torch.ones(3)})
    assert leakage(private, truth).startswith("private v leaked: recovered for 1 of 1 update(s)")
    assert leakage(Reconstruction(None), truth) == "the attack recovered no images, nor any private tensor"
    stopped = {"residual/conv2": torch.ones(2), "features/conv2": torch.ones(2, 3)}
    assert "only features/conv2 (the input of a layer behind" in leakage(Reconstruction(None, private=stopped), truth)
    beside = Reconstruction(truth.inputs, private={"v": torch.ones(3)})
    assert "private v leaked: recovered for 1 of 1" in leakage(beside, truth).splitlines()[-1]
