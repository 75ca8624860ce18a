"""Labels that clients tell the server themselves: counted where they are whole, and what is left where they are not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import worlds

from attacks.labels.recovery import fixed_labels, idlg_label
from attacks.update.observed_update import ObservedUpdate
from defenses.noise import Noise
from fl.data.augment import CropFlip
from fl.defense import Defense
from fl.federation import ClientData, Federation
from fl.methods.fedgen import FedGen
from fl.tensors import dense
from fl.types import Batch

STEP = FedGen(lr=0.1, steps=1, batch_size=None)
SHARES = "label_shares"


def fed(defense: Defense | None = None, rounds: int = 1, seed: int = 0) -> Federation:
    run = worlds.federation(STEP, defense, seed=seed, rounds=0)
    for _ in range(rounds):
        run.run_round()
    return run


def labeled(*labels: int) -> Batch:
    return replace(worlds.images(len(labels), "told"), labels=torch.tensor(labels))


def test_the_sign_rule_errs_where_generated_features_are_in_the_gradient_and_what_is_told_does_not() -> None:
    named, right = [], []
    for seed in range(6):
        for label in range(3):
            view, _ = fed(seed=seed).observe(0, data=labeled(label))
            by_sign, found = idlg_label(ObservedUpdate(view)), fixed_labels(view, "auto")
            assert by_sign is not None
            assert found is not None
            named.append(int(by_sign))
            assert found.tolist() == [label]
            right.append(label)
    assert sum(a != b for a, b in zip(named, right, strict=True)) >= 3


@pytest.mark.parametrize("method", [STEP, replace(STEP, steps=3, weight_decay=0.1)], ids=["a step", "three"])
@pytest.mark.parametrize("rounds", [0, 2])
def test_labels_of_a_batch_are_counted(rounds: int, method: FedGen) -> None:
    run = worlds.federation(method, rounds=rounds)
    view, _ = run.observe(1, data=labeled(2, 0, 2, 2, 1))
    found = fixed_labels(view, "auto")
    assert found is not None
    assert found.tolist() == [0, 1, 2, 2, 2]
    assert found.dtype == torch.int64


@pytest.mark.parametrize(("rounds", "said"), [(0, True), (1, False)])
def test_shares_that_are_not_whole_are_no_answer_and_then_the_gradient_is_asked_if_it_is_plain(
    rounds: int, said: bool
) -> None:
    view, truth = fed(rounds=rounds).observe(0, data=labeled(1))
    for off, there in ((0.05, True), (0.2, said), (-2.0, said)):
        sent = {**view.update, SHARES: dense(view.update[SHARES]) + torch.tensor([off, 0.0, 0.0], dtype=torch.float64)}
        found = fixed_labels(replace(view, update=sent), "auto")
        assert (found is not None) == there
        assert found is None or found.tolist() == truth.labels.tolist()
    assert (fixed_labels(replace(view, scale_unknown=True), "auto") is not None) == said
    fewer = torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64)  # -1, 2 and 0 images
    less = {**view.update, SHARES: dense(view.update[SHARES]) + fewer}
    assert (fixed_labels(replace(view, update=less), "auto") is not None) == said
    many = {**view.update, SHARES: dense(view.update[SHARES]) - 1.0}  # whole, but of more images than there are
    assert (fixed_labels(replace(view, update=many), "auto") is not None) == said


@pytest.mark.parametrize(("method", "counted"), [(STEP, True), (replace(STEP, batch_size=2), False)])
def test_changed_images_are_counted_only_where_the_whole_data_is_fed_again(method: FedGen, counted: bool) -> None:
    """Half the data fed once more comes to whole numbers, too, yet which half it was nobody tells."""
    data = labeled(0, 0, 1, 1)
    run = Federation(worlds.federation(method, rounds=0).client, [ClientData(data, data, CropFlip(padding=1))])
    run.run_round()
    view, truth = run.observe(0)
    found = fixed_labels(view, "auto")
    assert (None if found is None else found.tolist()) == (sorted(truth.labels.tolist()) if counted else None)


def test_noise_in_what_is_told_leaves_it_to_a_search() -> None:
    view, _ = fed(Noise(std=1.0)).observe(0, data=labeled(1))
    assert fixed_labels(view, "auto") is None
    assert STEP.disclosed_label_shares({}, {}) is None  # nor where a rewrite has left them out
