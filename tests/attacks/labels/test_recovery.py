"""Labels from the classifier's update: the sign rule, counts of a batch, several steps, what is refused."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from reference.label_counts import best_counts
from support import worlds

from attacks.labels.classifier_fit import ClassifierGradient
from attacks.labels.recovery import are_labels_proven, fixed_labels, idlg_label, recover_labels
from attacks.update.observed_update import ObservedUpdate
from defenses.clip import Clip
from defenses.compose import Chain
from defenses.prune import Prune
from defenses.qsgd import QSGD
from defenses.quantize import Quantize
from defenses.secagg import SecAgg
from defenses.signsgd import SignSGD
from eval.metrics.score import score
from fl.capture import from_batch
from fl.client import Client
from fl.defense import Defense
from fl.federation import ClientData, Federation
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.methods.fedper import FedPer
from fl.methods.hfedf import HFedF
from fl.methods.hfedf_latent import HFedFLatent
from fl.models import build
from fl.seeds import stream
from fl.types import Task, Truth
from fl.view import ServerView, ThreatModel

STEP = FedAvg(lr=0.1, steps=1, batch_size=None)


def task(classes: int = 10) -> Task:
    return build("hyperfl-grey", num_classes=classes, seed=0)


def victim(
    labels: list[int], method: Method = STEP, defense: Defense | None = None, given: Task | None = None
) -> tuple[ServerView, Truth]:
    given = given or task()
    images = torch.rand(len(labels), *given.input_shape, generator=stream(0, "labels", len(labels)))
    return from_batch(given.model, images, torch.tensor(labels), method=method, defense=defense, head="head.")


def named(view: ServerView) -> list[int] | None:
    found = fixed_labels(view, "auto")
    return None if found is None else found.tolist()


def biasless(given: Task) -> Task:
    given.model.head.bias = None  # type: ignore[union-attr, assignment]
    return replace(given, model=given.model)


@pytest.mark.parametrize("label", range(3))
@pytest.mark.parametrize("bias", [True, False])
def test_one_image_has_the_sign_rule(label: int, bias: bool) -> None:
    for given in (task(3), build("lenet-zhu", num_classes=3, seed=0)):
        view, _ = victim([label], given=given if bias else biasless(given))
        assert named(view) == [label]
        assert torch.equal(idlg_label(ObservedUpdate(view)), torch.tensor([label]))  # type: ignore[arg-type]


@pytest.mark.parametrize("keep", ["bias", "nothing"])
def test_a_bias_whose_negative_entry_was_left_out_does_not_tell_the_label(keep: str) -> None:
    """The rows of the weight do, where they were sent."""
    view, _ = victim([2], given=task(4), defense=Prune(ratio=0.5, keep="random"))
    weight, bias = (
        next(n for n in view.update if n.startswith("head.") and n.endswith(end)) for end in ("weight", "bias")
    )
    whole, _ = victim([2], given=task(4))
    sent = {**whole.update, bias: whole.update[bias] * torch.tensor([1.0, 1, 0, 1])}  # type: ignore[operator]
    if keep == "nothing":
        sent[weight] = torch.zeros_like(sent[weight])  # type: ignore[arg-type]
    assert named(replace(view, update=sent)) == ([2] if keep == "bias" else None)


@pytest.mark.parametrize("label", range(2))
def test_two_classes_without_a_bias_are_mirror_images(label: int) -> None:
    given = biasless(task(2))
    assert named(victim([label], given=given)[0]) is None
    assert named(victim([label], given=task(2))[0]) == [label]


BATCHES = [[1, 4], [2, 2, 2], [0, 1, 1, 3, 7, 7, 7, 9], [5] * 12 + [6, 6, 8, 9], list(range(10)) * 2]


@pytest.mark.parametrize("labels", BATCHES, ids=lambda labels: f"{len(labels)} images")
@pytest.mark.parametrize(
    "method",
    [
        STEP,
        FedAvg(lr=0.005, steps=5, batch_size=None, momentum=0.5),
        FedAvg(lr=0.005, epochs=2, batch_size=4, weight_decay=1e-3),
        FedAvg(lr=0.1, steps=1, batch_size=None, max_norm=0.05),
    ],
    ids=["one step", "momentum", "epochs", "clipped"],
)
def test_counts_of_a_batch_are_right_for_an_untrained_network(labels: list[int], method: FedAvg) -> None:
    view, _ = victim(labels, method)
    found = named(view)
    assert found == sorted(found or [])
    overlap = (Counter(found) & Counter(labels)).total()
    # without its size only the gradient's direction is fitted: equal shares of all classes then look like others
    assert overlap >= (len(labels) if method is STEP else (0.65 if method.max_norm else 0.9) * len(labels))


def test_without_a_bias_rows_in_the_direction_of_the_features_stand_for_it() -> None:
    labels = [0, 1, 1, 3, 7, 7, 7, 9]
    view, _ = victim(labels, given=biasless(task()))
    found = named(view)
    assert found is not None
    assert (Counter(found) & Counter(labels)).total() >= 7


def test_where_classes_are_told_apart_each_is_asked_for_its_own_prediction() -> None:
    """There, one mean prediction for all images is far off."""
    given = build("linear", num_classes=4, seed=0)
    prototypes = torch.rand(4, 1, 8, 8, generator=stream(0, "prototypes"))
    with torch.no_grad():
        given.model.head.weight.copy_(0.4 * (prototypes - prototypes.mean(0)).flatten(1))
    labels = [0, 0, 0, 1, 2, 2]
    noise = 0.02 * torch.randn(6, 1, 8, 8, generator=stream(0, "noise"))
    images = (prototypes[labels] + noise).clamp(0, 1)
    sure = given.model(images).softmax(-1)[range(6), labels].mean()
    assert 0.6 < sure < 0.95
    view, _ = from_batch(given.model, images, torch.tensor(labels), head="head.")
    assert named(view) == labels


def test_signs_are_proofs() -> None:
    """A class whose bias gradient is below zero is there, at least as often as the gradient needs."""
    labels = [5] * 7 + [6]
    view, _ = victim(labels)
    head = ClassifierGradient.of(ObservedUpdate(view))
    assert head is not None
    counts = head.count_labels(8)
    assert (counts >= (-8 * head.bias - 1e-3).ceil().clamp_min(0)).all()
    assert counts.sum() == 8


@pytest.mark.parametrize("doubt", [0.0, 1e-9])
@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_counts_are_the_best_of_all(seed: int, sized: bool, doubt: float) -> None:
    draw = stream(seed, "counts")
    predictions = torch.rand(4, 4, generator=draw, dtype=torch.float64).softmax(-1)
    true = torch.bincount(torch.randint(0, 4, (6,), generator=draw), minlength=4).double()
    bias = (predictions - torch.eye(4)).mT @ true / 6
    bias = bias + 0.02 * torch.randn(4, generator=draw, dtype=torch.float64) * sized
    view, _ = victim([1, 2])
    head = ClassifierGradient.of(ObservedUpdate(view))
    assert head is not None
    head = replace(head, bias=bias if sized else bias / 7, sent=torch.ones(4, dtype=torch.bool), sized=sized)
    found, left = head.fit_counts(predictions, 6, torch.zeros(4, dtype=torch.float64), doubt)
    assert torch.equal(found.long(), best_counts(bias, predictions, 6))
    assert sized or left < 1e-6


def test_a_pruned_bias_counts_where_it_was_sent() -> None:
    labels = [0, 0, 0, 3, 3, 7, 7, 9]
    view, _ = victim(labels, defense=Prune(ratio=0.5))
    found = named(view)
    assert found is not None
    assert (Counter(found) & Counter(labels)).total() >= 6


def with_mask(ratio: float, keep: str, seed: int, labels: list[int]) -> ServerView:
    mask, given = Prune(ratio=ratio, keep=keep), task()  # type: ignore[arg-type]
    images = torch.rand(len(labels), 1, 28, 28, generator=stream(0, "masked"))
    return from_batch(given.model, images, torch.tensor(labels), method=STEP, defense=mask, seed=seed, head="head.")[0]


@pytest.mark.parametrize("ratio", [0.1, 0.5])
def test_a_batch_is_counted_by_rows_whose_bias_a_random_mask_has_dropped(ratio: float) -> None:
    for seed in range(4):
        view = with_mask(ratio, "random", seed, [0, 0, 3, 7])
        assert not (view.update["head.bias"] != 0).all()  # type: ignore[union-attr]
        assert named(view) == [0, 0, 3, 7]


@pytest.mark.parametrize("ratio", [0.5, 0.7])
def test_without_a_bias_a_batch_is_counted_by_the_numbers_of_rows_that_were_sent(ratio: float) -> None:
    mask, labels, images = (
        Prune(ratio=ratio, keep="random"),
        [0, 0, 3, 7],
        torch.rand(4, 1, 28, 28, generator=stream(0, "rows")),
    )
    for seed in range(3):
        given = biasless(task())
        view, _ = from_batch(
            given.model, images, torch.tensor(labels), method=STEP, defense=mask, seed=seed, head="head."
        )
        assert named(view) == labels


@pytest.mark.parametrize("keep", ["random", "largest"])
def test_labels_under_a_mask_are_proven_only_by_numbers_that_were_sent(keep: str) -> None:
    proven = 0
    for seed in range(4):
        view = with_mask(0.3, keep, seed, [0, 0, 3, 7])
        whole = ClassifierGradient.of(ObservedUpdate(view))
        assert whole is not None
        least = whole.proven_counts(4)
        assert bool((least <= torch.tensor([2, 0, 0, 1, 0, 0, 0, 1, 0, 0])).all())
        assert not bool(least[view.update["head.bias"] == 0].any())  # type: ignore[index]
        told = are_labels_proven(view)
        assert told == (int(least.sum()) == 4)
        proven += told
    assert proven or keep == "random"


@pytest.mark.parametrize("defense", [QSGD(), Quantize(bits=8), SignSGD()], ids=str)
def test_numbers_that_were_altered_prove_no_labels(defense: Defense) -> None:
    assert not are_labels_proven(victim([0, 0, 3, 7], defense=defense)[0])


@pytest.mark.parametrize("ratio", [0.5, 0.9])
def test_rows_name_the_label_whose_bias_a_random_mask_has_dropped(ratio: float) -> None:
    step, images = task(), torch.rand(1, 1, 28, 28, generator=stream(0, "dropped"))
    dropped = 0
    for seed in range(4):
        mask = Prune(ratio=ratio, keep="random")
        view, _ = from_batch(step.model, images, torch.tensor([2]), method=STEP, defense=mask, seed=seed, head="head.")
        dropped += float(view.update["head.bias"][2]) == 0  # type: ignore[index]
        assert named(view) == [2]
    assert dropped


@pytest.mark.parametrize("known", [True, False])
def test_a_defense_is_looked_at_only_where_it_is_known(known: bool) -> None:
    view, _ = victim([0, 0, 0, 3, 3, 7, 7, 9], defense=Prune(ratio=0.5))
    view = replace(view, threat=ThreatModel(knows_defense=known))
    head = ClassifierGradient.of(ObservedUpdate(view))
    assert head is not None
    assert (head.sized, head.exact, bool(head.sent.all())) == (True, True, not known)


def test_what_gives_no_labels_away() -> None:
    assert named(victim([1, 2], FedPer(lr=0.1, steps=1))[0]) is None
    view, _ = victim([1, 2])
    assert named(replace(view, batch_size=None)) is None
    assert fixed_labels(view, "joint") is None
    assert fixed_labels(view, "random") is None
    assert recover_labels(ObservedUpdate(replace(view, update={}))) is None


def test_labels_are_counted_under_a_method_that_may_mask_features_and_does_not() -> None:
    labels, step = [0, 1, 1, 2, 3, 3], HFedF(lr=0.1, steps=1, batch_size=None, weight_decay=0.0)
    for dropout in (0.0, 0.5):
        given = build("hfedf-cnn", num_classes=4, input_shape=(1, 8, 8), dropout=dropout)
        assert named(victim(labels, step, given=given)[0]) == (None if dropout else labels)


def test_labels_are_counted_beside_a_latent_vector() -> None:
    labels, given = [0, 1, 1, 2, 3, 3], build("hfedf-cnn", num_classes=4, input_shape=(1, 8, 8))
    step = HFedFLatent(lr=0.1, steps=1, batch_size=None, weight_decay=0.0, autoencoder_rounds=0)
    assert named(victim(labels, step, given=given)[0]) == labels


def test_a_classifier_that_did_not_move_names_no_label() -> None:
    given = build("hfedf-cnn", num_classes=4, input_shape=(1, 8, 8))
    view, _ = victim([2], HFedFLatent(autoencoder_steps=1), given=given)
    assert not bool(view.update["head.bias"].any())  # type: ignore[union-attr]
    assert named(view) is None


def test_several_labels_are_not_counted_without_a_schedule() -> None:
    view, _ = victim([1, 2])
    assert recover_labels(ObservedUpdate(replace(view, schedule=None))) is None


def test_known_labels_come_first() -> None:
    view, _ = victim([1, 2])
    assert named(replace(view, labels=torch.tensor([2, 0]))) == [2, 0]


def test_recovered_labels_are_scored_as_a_bag_and_image_by_image() -> None:
    from attacks.gradient_matching.ig import InvertingGradients

    view, truth = victim([1, 4, 4], given=worlds.build("tiny", num_classes=5))
    result = InvertingGradients(iterations=2)(view)
    rows = score(result, truth)  # type: ignore[arg-type]
    assert all(row["label_overlap"] == 1 for row in rows)
    assert all(isinstance(row["label_correct"], bool) for row in rows)


@pytest.mark.parametrize("fed", [{"steps": 1}, {"steps": 1, "batch_size": 2}, {"epochs": 1, "batch_size": 1}])
def test_a_group_is_counted_only_where_every_image_weighs_the_same(fed: dict) -> None:
    """Six images and two: two of each fed, or as many steps as images, weigh apart in the mean."""
    given = worlds.task()
    data = [worlds.images(n, "group", n) for n in (6, 2)]
    run = Federation(Client(given, FedAvg(lr=0.01, **fed), SecAgg(group_size=2)), [ClientData(d, d) for d in data])
    view, truth = run.observe(0)
    alike = fed == {"steps": 1}
    assert named(view) == (truth.labels.sort().values.tolist() if alike else None)
    even = replace(view, parts=tuple(replace(part, weight=0.5) for part in view.parts))
    assert (named(even) is not None) == ("batch_size" in fed and "steps" in fed)


@pytest.mark.parametrize("by", ["method", "defense"])
def test_a_group_of_clipped_clients_is_not_counted(by: str) -> None:
    """Each is shortened by a factor of its own, so their images weigh apart in the mean."""
    method, defense = FedAvg(lr=0.1, steps=1, max_norm=0.05 if by == "method" else None), SecAgg(group_size=2)
    chain = defense if by == "method" else Chain(parts=(Clip(max_norm=0.005), defense))
    view, _ = worlds.federation(method, chain, rounds=0).observe(0)
    assert named(view) is None
    if by == "defense":
        assert named(replace(view, threat=replace(view.threat, knows_defense=False))) is not None
