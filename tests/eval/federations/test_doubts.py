"""Forms of an update that hide examples from the attacks of a screening alone are read, or said to be undecided."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from support import recorded as support
from torch import nn

from attacks.base import Reconstruction, Remark
from defenses.prune import Prune
from defenses.qsgd import QSGD
from defenses.quantize import Quantize
from defenses.signsgd import SignSGD
from eval.audit.recorded_update import RecordedUpdate
from eval.federations.doubts import find_doubt
from eval.federations.screening import Screener
from fl.defense import Defense
from fl.seeds import stream
from fl.tensors import dense

pytestmark = pytest.mark.usefixtures("own_time")


def screener(model: nn.Module, **settings: object) -> Screener:
    return Screener(model=lambda: model, input_shape=support.SHAPE, **settings)  # type: ignore[arg-type]


def compressed(update: RecordedUpdate, defense: Defense) -> RecordedUpdate:
    sent = defense.transform_update(dict(update.difference()), stream(0, "sent"))
    return replace(update, after={name: value - dense(sent[name]) for name, value in update.before.items()})


@pytest.mark.parametrize(
    ("defense", "how"),
    [
        (Prune(ratio=0.8), "up to a factor: "),
        (Quantize(bits=6), "up to a factor and to about "),
        (SignSGD(), "which of the 196 numbers that 1.1 takes are above, at or below zero"),
    ],
)
def test_a_compressed_update_of_one_example_is_read(defense: Defense, how: str) -> None:
    model = support.dense_network()
    found = screener(model, mean=(0.5,), std=(0.5,), seconds=5)(compressed(shifted(model), defense))
    assert (found.verdict, found.exposures[-1].attack) == ("leaked", "analytic, as compressed")
    assert how in found.reason


def shifted(model: nn.Module) -> RecordedUpdate:
    """One step on a picture whose pixels a loader has put around zero."""
    (inputs, labels), after = support.examples(1), copy.deepcopy(model)
    nn.functional.cross_entropy(after(2 * inputs - 1), labels).backward()
    torch.optim.SGD(after.parameters(), lr=0.1).step()
    return replace(support.recorded(model), after={name: value.clone() for name, value in after.state_dict().items()})


@pytest.mark.parametrize("defense", [SignSGD(), Quantize(bits=2), QSGD(bits=2)])
def test_what_no_attack_reads_is_not_decided(defense: Defense) -> None:
    model = support.dense_network()
    found = screener(model, seconds=2)(compressed(support.recorded(model), defense))
    assert (found.verdict, found.must_not_leave, found.exposures) == ("not decided", True, ())
    assert found.reason.startswith("nobody can say what it shows: ")
    stated = replace(support.PLAIN, examples=12)
    several = screener(model, seconds=2)(compressed(replace(support.recorded(model, 12), training=stated), defense))
    assert several.verdict == "not shown to leak"
    assert several.reason.startswith("nothing is shown, and the attacks of a screening do not read such an update: ")


def test_more_than_one_step_as_stated_is_not_decided() -> None:
    """Control variates and momentum of earlier rounds are gradients of other examples, which add their own inputs."""
    model = support.dense_network()
    update = support.recorded(model)
    others = support.recorded(model, 5).difference()
    after = {name: value - 0.5 * others[name] for name, value in update.after.items()}
    found = screener(model, seconds=3)(replace(update, after=after))
    assert (found.verdict, found.exposures) == ("not decided", ())
    assert "the update of '1' is made of 5 inputs at least, and 1 were stated" in found.reason
    honest = replace(update, after=after, training=replace(update.training, examples=5))
    assert screener(model, seconds=2)(honest).verdict != "not decided"


def test_weights_without_their_biases_are_not_called_safe() -> None:
    model = support.network()
    update = support.recorded(model)
    part = replace(update, after={"4.weight": update.after["4.weight"]})
    found = screener(model, seconds=2)(part)
    assert found.verdict == "not decided"
    assert "the update of '4.weight' is that of one input, which it tells up to a factor" in found.reason
    several = support.recorded(model, 3)
    stated = replace(several, after={"4.weight": several.after["4.weight"]})
    assert screener(model, seconds=2)(stated).verdict == "not shown to leak"


def test_numbers_that_rounding_took_are_not_said_to_be_left_out() -> None:
    model = support.dense_network()
    update = support.recorded(model, 1, replace(support.PLAIN, lr=1e-6))
    zeros = (update.difference()["1.weight"] == 0).double().mean()
    assert 0.2 < float(zeros) < 0.95
    found = screener(model, seconds=3)(update)
    assert "analytic, as compressed" not in found.tried


def test_a_row_alone_gives_away_what_its_layer_was_given() -> None:
    model = support.network()
    update = support.recorded(model)
    sent = update.before["4.weight"].clone()
    row = int(update.difference()["4.weight"].norm(dim=1).argmax())
    sent[row] = update.after["4.weight"][row]
    found = screener(model, seconds=2)(replace(update, after={**update.before, "4.weight": sent}))
    assert found.verdict == "not decided"
    assert "1 of the 24 rows of '4.weight' came back changed" in found.reason


@pytest.mark.parametrize("steps", [2, 20])
def test_steps_on_one_example_leave_its_direction(steps: int) -> None:
    model = support.network()
    alone = support.recorded(model, 1, replace(support.PLAIN, steps=steps))
    found = screener(model, seconds=2, allowed="labels")(alone)
    assert found.verdict == "not decided"
    assert "has one direction" in found.reason or "is that of one input" in found.reason
    several = support.recorded(model, 8, replace(support.PLAIN, steps=steps))
    assert screener(model, seconds=2)(several).verdict == "not shown to leak"


def test_biases_alone_are_held_against_what_an_example_has() -> None:
    """Attacks of a screening begin at weights; of a table of few columns biases alone may tell a row."""
    model = support.dense_network()
    update = support.recorded(model)
    biases = {name: value for name, value in update.after.items() if name.endswith("bias")}
    found = screener(model, seconds=2)(replace(update, after=biases))
    assert (found.verdict, "biases alone came back" in found.reason) == ("not shown to leak", True)
    table = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 10))
    trained = copy.deepcopy(table)
    nn.functional.cross_entropy(trained(torch.full((1, 4), 0.5)), torch.tensor([3])).backward()
    torch.optim.SGD(trained.parameters(), lr=0.1).step()
    before, after = ({name: value.clone() for name, value in one.state_dict().items()} for one in (table, trained))
    row = RecordedUpdate(
        before=before,
        after={**before, "0.bias": after["0.bias"], "2.bias": after["2.bias"]},
        training=support.PLAIN,
        origin={},
    )
    found = Screener(model=lambda: table, input_shape=(4,), seconds=2)(row)
    assert (found.verdict, "biases alone moved, since the weights came back" in found.reason) == ("not decided", True)
    row = replace(row, after={"0.bias": after["0.bias"], "2.bias": after["2.bias"]})
    found = Screener(model=lambda: table, input_shape=(4,), seconds=2)(row)
    assert (found.verdict, "biases alone came back" in found.reason) == ("not decided", True)


def test_weights_that_came_back_as_they_were_are_not_said_to_be_missing() -> None:
    """A client that trains biases alone sends its weights back, as one does that was given black pictures."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(196, 10))
    update = support.recorded(model)
    after = {**update.after, "1.weight": update.before["1.weight"]}
    found = screener(model, seconds=2)(replace(update, after=after))
    assert "biases alone came back" not in found.reason
    assert "biases alone moved, since the weights came back as they were: 10 numbers" in found.reason


@pytest.mark.parametrize(("count", "steps", "share"), [(1, 3, "52%"), (2, 2, "48%"), (4, 1, "65%")])
def test_numbers_left_out_of_several_steps_or_examples_are_named(count: int, steps: int, share: str) -> None:
    model = support.dense_network()
    plain = support.recorded(model, count, replace(support.PLAIN, steps=steps))
    found = screener(model, seconds=2)(compressed(plain, Prune(ratio=0.9)))
    assert found.verdict == ("not decided" if count == 1 else "not shown to leak")
    assert f"{share} of its numbers were left out here and there" in found.reason
    assert "left out here" not in screener(model, seconds=2)(plain).reason


@pytest.mark.parametrize("trained", [True, False])
def test_the_mode_of_batch_normalization_is_named_where_training_as_stated_makes_another_update(trained: bool) -> None:
    model = nn.Sequential(
        *(nn.Flatten(), nn.Linear(196, 24), nn.ReLU(), nn.Unflatten(1, (1, 4, 6))),
        *(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(24, 10)),
    )
    (inputs, labels), after = support.examples(1), copy.deepcopy(model).train(trained)
    nn.functional.cross_entropy(after(inputs), labels).backward()
    torch.optim.SGD(after.parameters(), lr=0.1).step()
    sent = {name: value.detach().clone() for name, value in after.named_parameters()}
    facts = replace(support.PLAIN, train_mode=not trained)
    update = replace(support.recorded(model.eval()), after=sent, training=facts)
    found = screener(model, seconds=5)(update)
    stated, true = ("evaluation", "training") if trained else ("training", "evaluation")
    assert found.verdict == "not decided"
    assert f"and train_mode: batch normalization counts as in {stated} mode" in found.reason
    assert f"(batch normalization in {true} mode where the client counts as in {stated}" in found.tried["analytic"]
    assert any(f"batch normalization in {stated} mode: a wrong one" in note for note in found.notes)
    plain = support.dense_network()
    other = screener(plain, seconds=2)(replace(support.recorded(plain, 8), training=replace(support.PLAIN, examples=8)))
    assert not any("batch normalization" in note for note in other.notes)


def test_what_others_could_not_be_compared_with_is_not_decided() -> None:
    model = support.dense_network()
    recorded = support.recorded(model)
    view = screener(model)._case(recorded).subject.view
    found = Reconstruction(inputs=None, remarks=frozenset({Remark.UNCOMPARED}))
    doubt = find_doubt(recorded.training, view, {"analytic": found}, None)
    assert "nobody can tell which of these it confuses with it (analytic)" in doubt


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn])
@pytest.mark.parametrize("start", [True, False])
def test_what_rounding_to_few_digits_took_is_not_said_to_be_left_out(kind: torch.dtype, start: bool) -> None:
    model = support.dense_network()
    update = support.recorded(model)
    before, after = ({name: value.to(kind) for name, value in one.items()} for one in (update.before, update.after))
    found = screener(model, seconds=3)(replace(update, before=before if start else update.before, after=after))
    said = " ".join((found.reason, *found.notes))
    assert not any(words in said for words in ("left out", "missing in other places", "clipping by value:"))
    if kind.itemsize == 1:
        assert found.verdict == "not decided"
        assert f"its numbers were sent in {str(kind).removeprefix('torch.')}" in found.reason


@pytest.mark.parametrize(("count", "steps"), [(24, 1), (1, 30), (4, 8)])
@pytest.mark.parametrize("how", ["largest", "random"])
def test_zeros_that_many_examples_may_leave_are_named(count: int, steps: int, how: str) -> None:
    """As many examples as rows may leave any zeros: nobody can tell, and a screening says that."""
    model = support.dense_network()
    plain = support.recorded(model, count, replace(support.PLAIN, steps=steps))
    sent = compressed(plain, Prune(ratio=0.9, keep=how))
    found = screener(model, seconds=2)(sent)
    assert found.verdict == ("not decided" if count == 1 else "not shown to leak")
    told = "all but" in found.reason and "one input" in found.reason
    assert told or "zero here and there. As many examples, those of all steps counted, may leave" in found.reason
    assert "here and there" not in screener(model, seconds=2)(plain).reason


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("as_file", [True, False])
def test_what_rounding_of_one_tensor_took_is_not_said_to_be_left_out(kind: torch.dtype, as_file: bool) -> None:
    model = support.network()
    update = support.recorded(model, 4)
    name = "4.weight"
    before, after = ({**one, name: one[name].to(kind)} for one in (update.before, update.after))
    if not as_file:
        before, after = ({**one, name: one[name].float()} for one in (before, after))
    found = screener(model, seconds=2)(replace(update, before=before, after=after))
    said = " ".join((found.reason, *found.notes))
    assert not any(words in said for words in ("left out", "missing in other places", "zero here and there"))


@pytest.mark.parametrize("optimizer", ["adam"])
def test_signs_of_a_stated_optimizer_are_not_called_few_bits(optimizer: str) -> None:
    model = support.dense_network()
    facts = replace(support.PLAIN, optimizer=optimizer, lr=1e-3)
    found = screener(model, seconds=2)(support.recorded(model, 4, facts))
    assert "few bits" not in found.reason
    assert "signs alone, or as good as" in found.reason


def test_a_step_size_that_is_off_is_named_where_no_neuron_seems_to_see_one_image() -> None:
    model = support.dense_network()
    update = support.recorded(model, 4)
    wrong = replace(update, training=replace(update.training, lr=0.101))
    assert screener(model, seconds=2)(update).verdict == "leaked"
    said = screener(model, seconds=2)(wrong).tried["analytic"]
    assert "at the step size as stated" in said
    assert "an lr that is off by a hundredth" in said
