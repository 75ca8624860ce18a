from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fl.losses import losses
from fl.losses.bce import BinaryCrossEntropy
from fl.losses.cross_entropy import CrossEntropy
from fl.losses.function import GivenFunction, NamedFunction, build_loss, known_loss
from fl.losses.mse import SquaredError
from fl.losses.segmentation import Segmentation
from fl.losses.target_bounds import TargetBoundsCheck
from fl.seeds import stream

LOGITS = torch.tensor([[0.5, -1.0, 2.0], [0.1, 0.2, 0.3]])


@pytest.mark.parametrize(
    ("loss", "own", "outputs", "targets"),
    [
        (CrossEntropy(), nn.CrossEntropyLoss(), LOGITS, torch.tensor([2, 0])),
        (BinaryCrossEntropy(), nn.BCEWithLogitsLoss(), LOGITS, torch.tensor([[1.0, 0, 1], [0, 0, 1]])),
        (BinaryCrossEntropy(logits=False), nn.BCELoss(), LOGITS.sigmoid(), torch.tensor([[1.0, 0, 1], [0, 0, 1]])),
        (SquaredError(), nn.MSELoss(), LOGITS, torch.zeros(2, 3)),
        (Segmentation(), nn.CrossEntropyLoss(), LOGITS[:, :, None].expand(2, 3, 4), torch.tensor([[0, 1, 2, 1]] * 2)),
    ],
)
def test_losses_are_those_of_torch(loss, own, outputs, targets):
    assert torch.equal(loss(outputs, loss.prepare(targets, outputs.shape[1:])), own(outputs, targets))
    if not isinstance(loss, Segmentation):
        assert build_loss(own) == loss


@pytest.mark.parametrize(
    ("name", "shape", "targets", "said"),
    [
        ("cross-entropy", (3,), torch.tensor([0.0, 1.0]), "expected labels int64"),
        ("cross-entropy", (3,), torch.tensor([0, 3]), r"expected labels in \[0, 3\), got 0 to 3"),
        ("bce", (1,), torch.tensor([0.0, 2.0]), "0 or 1, or between, got 0 to 2"),
        ("bce", (3,), torch.tensor([0.0, 1.0]), r"expected a target of shape \(3,\)"),
        ("mse", (1,), torch.tensor([0.0, torch.nan]), "expected finite targets"),
        ("mse", (1,), torch.tensor([1j, 1j]), "expected real numbers"),
        ("segmentation", (3, 2, 2), torch.zeros(2, 2, 2), r"expected masks int64 \(2, 2, 2\)"),
        (
            "segmentation",
            (5, 3),
            torch.zeros(2, 5, dtype=torch.int64),
            r"give output=lambda found: found.movedim\(-1, 1\)",
        ),
        ("segmentation", (3, 2, 2), torch.full((2, 2, 2), 3), r"expected classes in \[0, 3\)"),
    ],
)
def test_targets_that_do_not_fit_are_refused_by_what_they_are(name, shape, targets, said):
    with pytest.raises(ValueError, match=said):
        losses.build(name).prepare(targets, torch.Size(shape))


@pytest.mark.parametrize(
    ("name", "outputs", "said"),
    [
        ("cross-entropy", torch.zeros(2, 1), "for one logit of a yes or no give loss='bce'"),
        ("cross-entropy", torch.zeros(2), "loss='bce'"),
        ("cross-entropy", torch.zeros(2, 3, 4, 4), "loss='segmentation'"),
        (
            "cross-entropy",
            torch.zeros(2, 4, 3),
            r"classes that come last with output=lambda found: found.movedim\(-1, 1\)",
        ),
        ("segmentation", torch.zeros(2, 3), r"logits \(B, K, ...\)"),
        ("segmentation", torch.zeros(2, 1, 4, 4), "expected 2 classes or more"),
        ({"name": "bce", "logits": False}, torch.full((2, 1), 3.0), r"expected probabilities in \[0, 1\]"),
    ],
)
def test_outputs_that_do_not_fit_are_refused_with_what_to_take(name, outputs, said):
    with pytest.raises(ValueError, match=said):
        losses.build(name).check_outputs(outputs)


def test_labels_of_a_yes_or_no_are_targets_in_the_shape_of_the_outputs():
    loss = BinaryCrossEntropy()
    assert loss.prepare(torch.tensor([1, 0]), torch.Size([1])).tolist() == [[1.0], [0.0]]
    assert loss.every_target(torch.Size([2]), 4).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert loss.every_target(torch.Size([2]), 3) is None


@pytest.mark.parametrize("loss", [BinaryCrossEntropy(), SquaredError()])
def test_the_gradient_of_the_outputs_tells_the_target(loss):
    outputs = torch.tensor([[0.3, -2.0, 1.5]], requires_grad=True)
    target = torch.tensor([[1.0, 0.0, 1.0]])
    (signal,) = torch.autograd.grad(loss(outputs, target), outputs)
    told = loss.target_of_signal(3 * signal[0])
    if told is None:
        told = loss.target_of_outputs(outputs.detach(), signal)
    torch.testing.assert_close(told, target)


def test_a_loss_of_ones_own_is_taken_by_name_or_as_a_callable():
    named = build_loss("torch.nn.functional:l1_loss")
    given = build_loss(nn.functional.l1_loss)
    assert named(LOGITS, LOGITS + 1) == given(LOGITS, LOGITS + 1) == 1
    weighed = build_loss(nn.BCEWithLogitsLoss(pos_weight=torch.ones(3)))
    assert isinstance(weighed, GivenFunction)
    assert weighed.variable_shape(torch.Size([3])) is None  # nobody said what its targets can be
    with pytest.raises(ValueError, match=r"to return one number, a floating-point tensor \(\), got"):
        build_loss(lambda outputs, targets: outputs)(LOGITS, LOGITS)
    with pytest.raises(ValueError, match="unknown loss 'bcee'; did you mean 'bce'"):
        build_loss("bcee")
    with pytest.raises(ValueError, match="expected loss as a name"):
        build_loss(3)


class OwnError(Exception):
    """What a function of the user's own raises at what it does not take."""


def strict(outputs, targets):
    if outputs.dtype != torch.float32 or targets.dtype != torch.float32 or outputs.shape != targets.shape:
        raise OwnError(outputs.dtype)
    return (outputs - targets).abs().mean()


class Counting(nn.Module):
    """A loss that keeps how often it was called, and draws."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.calls = 0

    def forward(self, outputs, targets):
        self.calls += 1
        self.mean = 0.9 * self.mean + outputs.detach().mean()
        return nn.functional.mse_loss(outputs + 0.1 * torch.randn_like(outputs), targets)


@pytest.mark.parametrize(
    ("function", "said"),
    [("torch.nn.functional:no_such_loss", "expected a function 'no_such_loss'"), ("no_such_module:loss", "no module")],
)
@pytest.mark.parametrize("targets", ["known", "free"])
def test_a_function_that_is_not_there_is_refused_before_anybody_calls_it(function, said, targets):
    """Of an update without labels nobody does."""
    with pytest.raises(ValueError, match=said):
        known_loss(NamedFunction(function=function, targets=targets), torch.Size([3]))


def test_a_function_that_is_asked_stays_as_it_was_and_may_raise_anything():
    own, before = build_loss(Counting()), torch.get_rng_state()
    assert known_loss(own, torch.Size([3])) == own
    assert (own.call.calls, own.call.mean.dtype, float(own.call.mean)) == (0, torch.float32, 0.0)
    assert torch.equal(before, torch.get_rng_state())
    assert known_loss(build_loss(strict), torch.Size([3])) == build_loss(strict)


def test_what_the_user_says_of_targets_stands():
    soft = NamedFunction(function="torch.nn.functional:cross_entropy", targets="probabilities")
    assert known_loss(soft, torch.Size([3])) == soft


def weighted(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, weight=torch.tensor([1.0, 1, 2]).to(outputs))


@pytest.mark.parametrize(
    ("function", "shape", "known"),
    [
        (nn.functional.cross_entropy, (3,), CrossEntropy()),
        ("torch.nn.functional:cross_entropy", (3,), CrossEntropy()),
        (lambda outputs, targets: -outputs.log_softmax(1)[range(len(targets)), targets].mean(), (10,), CrossEntropy()),
        (nn.functional.cross_entropy, (3, 4, 4), Segmentation()),
        (nn.functional.mse_loss, (1,), SquaredError()),
        (lambda outputs, targets: (outputs - targets).pow(2).mean(), (2, 5), SquaredError()),
        (nn.functional.binary_cross_entropy_with_logits, (4,), BinaryCrossEntropy()),
        (nn.functional.binary_cross_entropy, (1,), BinaryCrossEntropy(logits=False)),
        (lambda outputs, targets: nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1), (3,), "classes"),
        (lambda outputs, targets: nn.functional.cross_entropy(outputs, targets, reduction="sum"), (3,), "classes"),
        (lambda outputs, targets: nn.functional.cross_entropy(outputs, targets, ignore_index=2), (3,), "classes"),
        (lambda outputs, targets: 2 * nn.functional.mse_loss(outputs, targets), (1,), None),
        (lambda outputs, targets: nn.functional.cross_entropy(outputs, targets, reduction="sum") / 6, (3,), "classes"),
        (lambda outputs, targets: nn.functional.cross_entropy(outputs.clamp(-10, 10), targets), (3,), "classes"),
        (lambda outputs, targets: 2 * nn.functional.huber_loss(outputs, targets, delta=10), (1,), None),
        (weighted, (3,), "classes"),
        (lambda outputs, targets: nn.functional.cross_entropy(outputs.double(), targets), (3,), CrossEntropy()),
        (nn.functional.multi_margin_loss, (4,), "classes"),
        (lambda outputs, targets: nn.functional.mse_loss(outputs.softmax(1), torch.eye(3)[targets]), (3,), "classes"),
        (nn.functional.l1_loss, (2,), None),
        (lambda outputs, targets: (outputs[:, 0] - targets).abs().mean(), (3,), None),  # of numbers
        (lambda outputs, targets: torch.pdist(outputs)[torch.pdist(targets[:, None] * 1.0) == 0].mean(), (3,), None),
        (lambda outputs, targets: nn.functional.cross_entropy(nn.functional.dropout(outputs), targets), (3,), None),
        (nn.CrossEntropyLoss(label_smoothing=0.1), (3, 4, 4), None),
    ],
)
def test_functions_are_known_by_what_they_return(function, shape, known):
    built = build_loss(function)
    expected = {None: built, "classes": replace(built, targets="classes")}.get(known, known)
    assert known_loss(built, torch.Size(shape)) == expected


def test_functions_of_many_classes_and_of_more_than_there_are_outputs_are_told_apart():
    for count in (2, 1500):
        smoothed = known_loss(build_loss(nn.CrossEntropyLoss(label_smoothing=0.1)), torch.Size([count]))
        assert smoothed.takes_classes
    table = torch.randn(10, 6, generator=torch.Generator().manual_seed(0))
    more = build_loss(lambda outputs, targets: nn.functional.cross_entropy(outputs @ table.T, targets))
    assert not known_loss(more, torch.Size([6])).takes_classes


def test_a_function_of_classes_has_targets_to_try_and_none_to_search_for():
    loss = known_loss(build_loss(weighted), torch.Size([3]))
    assert loss.every_target(torch.Size([3]), 2).tolist() == [0, 1]
    assert loss.variable_shape(torch.Size([3])) is None
    assert loss.errors(torch.tensor([0, 1]), torch.tensor([[0.9, 0.1, 0], [0.9, 0.1, 0]])).tolist() == [0, 1]
    assert [loss.sends_back_one_direction(torch.Size([count])) for count in (2, 3)] == [True, False]
    own = known_loss(
        build_loss(lambda outputs, targets: -outputs[range(len(targets)), targets].mean()), torch.Size([3])
    )
    assert own.sends_back_one_direction(torch.Size([3]))
    assert build_loss(weighted).every_target(torch.Size([3]), 4) is None
    with pytest.raises(ValueError, match=r"logits \(B, K\), K >= 2, under a loss with targets='classes', got \(3, 4\)"):
        known_loss(loss, torch.Size([3, 4]))


def _takes_targets_first(targets: Tensor, outputs: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets)


def _wants_a_dictionary(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs["logits"], targets)  # type: ignore[call-overload]


def _detaches(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.detach(), targets)


def _reads_no_such_attribute(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.logits.sum() + targets.sum()  # type: ignore[attr-defined]


@pytest.mark.parametrize("mistaken", [_takes_targets_first, _wants_a_dictionary, _detaches, _reads_no_such_attribute])
def test_a_function_with_a_mistake_is_refused_by_what_it_raises(mistaken: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(ValueError, match=r"can't be called as loss\(outputs, targets\) with outputs \(2, 3\)"):
        build_loss(mistaken).prepare(torch.tensor([0, 2]), torch.Size([3]))


def test_a_function_of_probabilities_and_one_that_refuses_some_targets_are_no_mistakes() -> None:
    def never_one_class(outputs: Tensor, targets: Tensor) -> Tensor:
        if len(targets.unique()) < 2:
            raise RuntimeError("one class alone")
        return functional.cross_entropy(outputs, targets)

    def of_probabilities(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.binary_cross_entropy(outputs, targets)

    labels = torch.tensor([1, 1])
    assert torch.equal(build_loss(never_one_class).prepare(labels, torch.Size([3])), labels)
    assert build_loss(of_probabilities).prepare(torch.ones(2, 3), torch.Size([3])).shape == (2, 3)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (torch.tensor([0.0, 2.0]), r"float32 \(2,\); take \.long\(\) of them"),
        (torch.tensor([[0], [2]]), r"int64 \(2, 1\); take \.flatten\(\) of them"),
        (torch.tensor([[0.0], [2.0]]), r"take \.flatten\(\)\.long\(\) of them"),
        (torch.eye(3)[[0, 2]], r"float32 \(2, 3\); of one-hot labels take \.argmax\(1\)"),
        (torch.full((2, 4), 0.25), r"float32 \(2, 4\)$"),
        (torch.full((2, 3), 1 / 3).double(), r"probabilities of classes need a loss of their own"),
        (torch.tensor([0.0, 2.0]), r"of them, or, if they are no classes, give loss='bce' or 'mse'"),
        (torch.tensor([0.3, 2.0]), r"for numbers give loss='mse', for chances of a yes or no loss='bce'"),
        (torch.tensor([[1, 0, 1], [0, 0, 0]]), r"for several labels of an example, each a yes or no, give loss='bce'"),
        (torch.tensor([[1.0, 0, 0.5], [0, 0, 0]]), r"for a number of each output give loss='mse'"),
    ],
)
def test_labels_of_another_form_are_refused_with_what_makes_them_classes(labels: Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=rf"expected labels int64 \(2,\), got .*{said}"):
        CrossEntropy().prepare(labels, torch.Size([3]))


def test_classes_under_a_loss_of_numbers_are_refused_with_what_they_are_for() -> None:
    with pytest.raises(ValueError, match="for classes give loss=cross-entropy, or one-hot targets"):
        build_loss("bce").prepare(torch.tensor([0, 2]), torch.Size([3]))


def test_a_loss_of_each_example_is_refused_with_what_to_return() -> None:
    with pytest.raises(ValueError, match=r"return one number.*return the mean over the batch .reduction='mean'"):
        build_loss(torch.nn.CrossEntropyLoss(reduction="none"))(torch.zeros(2, 3), torch.tensor([0, 1]))


def test_a_loss_of_sequences_is_not_tried_with_targets_that_are_no_classes():
    """PyTorch would read beyond its memory, and the process may end."""
    taken = []

    def aligned(outputs, targets):
        taken.append(targets)
        steps = [torch.full((len(outputs),), size) for size in (outputs.shape[1], targets.shape[1])]
        return functional.ctc_loss(outputs.transpose(0, 1).log_softmax(2), targets, *steps)

    own = GivenFunction(call=aligned)
    assert known_loss(own, torch.Size((12, 6))) == own
    assert any(bool((targets >= 6).any()) for targets in taken)


@pytest.mark.parametrize(
    ("targets", "lengths", "said"),
    [
        ([[1, 4], [3, 1]], (2, 2), "targets from 0 to 3"),
        ([[-1, 2], [3, 1]], (2, 2), "targets from 0 to 3"),
        ([1, 2, 3], (2, 2), "target_lengths up to the 3"),
    ],
)
def test_target_bounds_of_sequences_are_refused_with_words(targets, lengths, said):
    outputs = torch.randn(5, 2, 4, generator=stream(0, "steps")).log_softmax(2)
    with TargetBoundsCheck():
        functional.ctc_loss(outputs, torch.tensor([1, 2, 3]), (5, 5), (2, 1))
        with pytest.raises(ValueError, match=said):
            nn.CTCLoss()(outputs, torch.tensor(targets), (5, 5), lengths)


@pytest.mark.parametrize("kind", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("weights", [torch.float16, torch.float32, torch.float64])
def test_weights_of_classes_go_with_outputs_of_any_type(weights, kind):
    own = GivenFunction(call=nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 2.0], dtype=weights)))
    outputs, labels = LOGITS.to(kind), torch.tensor([2, 0])
    like = functional.cross_entropy(outputs, labels, weight=torch.tensor([0.5, 1.0, 2.0], dtype=kind))
    assert torch.equal(own(outputs, labels), like)
    assert known_loss(own, torch.Size((3,))).takes_classes
    assert own.call.weight.dtype is weights
