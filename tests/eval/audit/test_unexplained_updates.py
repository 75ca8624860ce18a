"""Updates that are no step as stated, though a picture explains a layer: no leak, no all-clear, and a way on."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import pytest
import torch
from support.chains import initialized
from torch import Tensor, nn
from torch.nn import functional

import hyperleak
from attacks.result import Remark
from attacks.verification.nearly_told import NEARLY_TOLD
from eval.audit.findings import AttackFinding, AuditReport
from eval.audit.judgment import Judgment
from eval.audit.junit import junit_xml
from eval.audit.recorded_update import RecordedUpdate, TrainingFacts
from eval.audit.sarif import sarif_log
from eval.audit.source_place import ROOT, SourcePlace
from eval.federations.screening import Screener
from eval.report.sections.inconclusive import outcomes_of_rows
from fl.seeds import stream

SHAPE, RATE = (3, 4, 4), 0.1
METHOD = {"name": "fedavg", "lr": RATE, "steps": 1}
PLACE = SourcePlace("model.py", ROOT, 1, 1, "model.build")
State = dict[str, Tensor]


def network() -> nn.Module:
    return initialized(nn.Sequential(nn.Flatten(), nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 10))).float()


def pictures(count: int) -> Tensor:
    return (torch.rand(count, *SHAPE, generator=stream(0, "pictures")) * 255).round() / 255


def gradient(first: int = 0, count: int = 1) -> State:
    model = network()
    labels = torch.arange(first, first + count) % 10
    functional.cross_entropy(model(pictures(first + count)[first:]), labels).backward()
    return {name: value.grad for name, value in model.named_parameters()}


def by_groups() -> State:
    """Return a step of an optimizer whose second group of parameters has a step size of its own."""
    return {name: (RATE if name.startswith("1.") else RATE / 5) * value for name, value in gradient().items()}


def of_biases() -> State:
    """Return a step whose biases have a step size of their own, so that a picture too dark explains each layer."""
    return {name: RATE * value * (1.2 if name.endswith("bias") else 1.0) for name, value in gradient().items()}


def unequal_mean() -> State:
    return {name: RATE * (0.999 * value + 0.001 * gradient(1)[name]) for name, value in gradient().items()}


def with_control() -> State:
    """Return a step of SCAFFOLD with a small control variate."""
    return {name: RATE * (value + 0.05 * gradient(2, 8)[name]) for name, value in gradient().items()}


def audit(update: State, *attacks: str, **settings) -> Judgment:
    settings = {"input_shape": SHAPE, "method": METHOD, "attacks": attacks, **settings}
    return Judgment(hyperleak.audit(network(), update=update, **settings))


@pytest.mark.parametrize("made", [by_groups, of_biases, unequal_mean, with_control])
def test_what_explains_a_layer_but_not_the_update_is_neither_a_leak_nor_an_all_clear(made: Callable[[], State]) -> None:
    judgment = audit(made(), "analytic")
    (found,) = judgment.report.findings
    assert found.verdict.startswith("not decided, as the attack found a picture that explains ")
    assert "it may be the true one, or wrong" in found.verdict
    assert found.notes
    assert not judgment.leaks
    assert judgment.undecided


def test_a_step_as_stated_is_told_as_before() -> None:
    (found,) = audit({name: RATE * value for name, value in gradient().items()}, "analytic").report.findings
    assert found.verdict.startswith("the attack confirms")


def test_a_small_control_variate_is_named_among_the_reasons_where_the_layer_is_nearly_explained() -> None:
    for found in audit(with_control(), "analytic", "cascade").report.findings:
        assert "explains nearly all of what it was read from" in found.verdict
        assert any(NEARLY_TOLD.partition("{share")[0].format(what="picture") in note for note in found.notes)


@pytest.mark.parametrize("attack", ["analytic", "cascade", "rconv", "rgap"])
@pytest.mark.parametrize(("saturated", "share"), [(False, 0.05), (True, 0.05), (True, 0.4)])
def test_every_attack_that_solves_says_nearly_of_pictures_with_black_and_white_pixels(
    attack: str, saturated: bool, share: float
) -> None:
    """What went in beside such a picture moves some of its pixels beyond [0, 1], the more so the more it is."""
    model = initialized(nn.Sequential(nn.Flatten(), nn.Linear(48, 24), nn.LeakyReLU(0.2), nn.Linear(24, 10))).float()
    both = pictures(9)
    both[0] = both[0].round() if saturated else both[0]
    moved = dict[str, Tensor]()
    for part, weight in ((slice(0, 1), 1.0), (slice(1, 9), share)):
        model.zero_grad()
        functional.cross_entropy(model(both[part]), torch.arange(9)[part]).backward()
        for name, value in model.named_parameters():
            moved[name] = moved.get(name, torch.zeros_like(value)) + RATE * weight * value.grad
    settings = {"input_shape": SHAPE, "method": METHOD, "attacks": [attack]}
    (found,) = hyperleak.audit(model, update=moved, **settings).findings
    assert "explains nearly all of what it was read from" in found.verdict, found


def test_an_update_of_unlike_pictures_is_not_said_to_be_nearly_explained() -> None:
    (found,) = audit({name: RATE * value for name, value in gradient(0, 4).items()}, "analytic").report.findings
    assert found.verdict.startswith("the attack found nothing that explains the update, which does not show that ")


def test_tensors_divided_by_their_own_step_sizes_are_audited_as_the_gradient_as_the_way_on_says() -> None:
    (question,) = [one for one in audit(by_groups(), "analytic").undecided if "is not borne out" in one.what]
    assert "audit that as the gradient" in question.remedy
    own = {name: value * (1 if name.startswith("1.") else 5) for name, value in by_groups().items()}
    assert [leak.rule for leak in audit(own, "analytic", kind="gradient", method=None).leaks] == [
        "confirmed-reconstruction"
    ]


@pytest.mark.parametrize("made", [by_groups, with_control])
def test_files_for_continuous_integration_and_assertions_fail(made: Callable[[], State]) -> None:
    judgment = audit(made(), "analytic", "rconv")
    xml = junit_xml(judgment, version="1", at=datetime(2026, 1, 1, tzinfo=UTC))
    assert 'type="not-decided"' in xml
    assert xml.count("<skipped") == len(judgment.report.findings)  # none of which passes
    results = sarif_log(judgment, PLACE, version="1", exit_code=4)["runs"][0]["results"]
    assert {one["ruleId"] for one in results} == {"not-decided"}
    with pytest.raises(AssertionError, match="not decided") as failure:
        hyperleak.assert_no_leak(network(), update=made(), input_shape=SHAPE, method=METHOD, attacks=["analytic"])
    assert "give the true images" in str(failure.value)
    assert "--" not in str(failure.value)  # options of the command line


@pytest.mark.parametrize("made", [by_groups, of_biases])
def test_a_screening_does_not_let_them_pass(made: Callable[[], State]) -> None:
    before = network().state_dict()
    after = {name: value - made()[name] for name, value in before.items()}
    facts = TrainingFacts(examples=1, batch_size=1, steps=1, lr=RATE, optimizer="sgd", momentum=0.0, weight_decay=0.0)
    screening = Screener(model=network, input_shape=SHAPE, seconds=20)(
        RecordedUpdate(before=before, after=after, training=facts)
    )
    assert screening.must_not_leave
    assert screening.verdict != "failed"


def test_the_audit_as_a_whole_says_leaked_where_one_attack_gets_through_and_another_does_not() -> None:
    report = hyperleak.audit(
        network(), pictures(1), [0], update=by_groups(), method=METHOD, attacks=["rconv", "analytic"]
    )
    judgment = Judgment(report)
    assert {found.attack: found.leaked for found in report.findings} == {"rconv": False, "analytic": True}
    assert [leak.attack for leak in judgment.violations] == ["analytic"]
    assert not judgment.undecided
    assert report.best("psnr") > 60


def test_features_that_are_nearly_explained_leave_an_audit_undecided() -> None:
    rows = [{"update": 0, "images": 1, "candidates": 0, "verified": False, "note": "nearly"}]
    assert outcomes_of_rows("exact", rows)[0].kind == "blind"
    (one,) = outcomes_of_rows("exact", [{**rows[0], "remarks": [Remark.NEARLY_TOLD]}])
    report = AuditReport("mine", [AttackFinding("exact", [], "", "", outcomes=[one])], captured=True)
    assert "nearly" in [question.why for question in Judgment(report).undecided]


@pytest.mark.parametrize("known", [True, False])
def test_features_alone_are_no_all_clear(known: bool) -> None:
    layers = (nn.Conv2d(3, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 24), nn.ReLU(), nn.Linear(24, 10))
    model = initialized(nn.Sequential(*layers)).float()
    image, label = pictures(1), torch.tensor([1])
    functional.cross_entropy(model(image), label).backward()
    update = {name: RATE * value.grad for name, value in model.named_parameters()}
    told = (image, label) if known else (None, None)
    report = hyperleak.audit(model, *told, update=update, input_shape=SHAPE, method=METHOD, attacks=["analytic"])
    assert report.findings[0].verified
    (question,) = Judgment(report).undecided
    assert question.why.startswith("only features came back")


def test_pixels_that_a_loader_normalized_come_back_once_the_model_does_so_as_the_note_says() -> None:
    model, inputs = network(), pictures(1)
    model.register_forward_pre_hook(lambda module, given: ((given[0] - 0.5) / 0.25,))
    functional.cross_entropy(model(inputs), torch.tensor([3])).backward()
    update = {name: RATE * value.grad for name, value in model.named_parameters() if value.grad is not None}
    settings = {"input_shape": SHAPE, "method": METHOD, "attacks": ["analytic"]}
    (unsaid,) = hyperleak.audit(network(), update=update, **settings).findings
    assert "model.register_forward_pre_hook(lambda module, inputs: ((inputs[0] - mean) / std,))" in unsaid.notes[0]
    labels = torch.tensor([3])
    (said,) = hyperleak.audit(model, inputs, labels, update=update, method=METHOD, attacks=["analytic"]).findings
    assert said.verified
    assert said.rows[0]["psnr"] > 50
