"""Several steps on the same images: what the later ones added is taken off, and whether all is explained is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.pictures import LEAKY, POOLED, attack, error, network, photograph, victim
from torch import Tensor, nn

from attacks import Attack, NotApplicable, Reconstruction, Result
from attacks.base import build
from attacks.rewriting.first_step import FirstStep, _best_factor, _missed_share
from attacks.rewriting.surrogate import ONE_STEP_SURROGATE
from defenses.clip import Clip
from fl.client import Client
from fl.defense import Defense
from fl.federation import ClientData, Federation
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.methods.fedper import FedPer
from fl.seeds import stream
from fl.tensors import dense
from fl.types import Batch
from fl.view import ServerView, ThreatModel

LINEAR = network(nn.Flatten(), nn.Linear(196, 40, bias=False), LEAKY)
"""Quick to undo, and not exact by itself: what flows back into its first layer comes through one that moves."""
UNCORRECTED = {"name": "chain", "first": {"name": "surrogate", "along": 0.0}, "then": "cascade"}


def pictures(count: int) -> Tensor:
    """A photograph, moved by three columns from one to the next (count, 1, 14, 14)."""
    return torch.cat([photograph(14).roll(3 * i, -1) for i in range(count)])


def seen(method: Method, images: int = 1, defense: Defense | None = None, **threat: Any) -> ServerView:
    """One round on parts of a photograph."""
    batch = Batch(pictures(images), torch.arange(images) % 3)
    client = Client(LINEAR, method, *([] if defense is None else [defense]))
    return Federation(client, [ClientData(batch, batch)]).observe(0, threat=ThreatModel(**threat))[0]


@pytest.mark.parametrize(
    "settings",
    [pytest.param({"steps": 5}, marks=pytest.mark.slow), {"epochs": 5, "momentum": 0.5, "weight_decay": 1e-2}],
    ids=["plain", "momentum and decay"],
)
def test_several_steps_on_one_image_give_it_back_to_rounding(settings: dict[str, Any]) -> None:
    view = victim(LINEAR, photograph(14), FedAvg(lr=3e-3, **settings))
    rough, found = build(UNCORRECTED)(view), attack(view, "first-step+cascade")
    assert isinstance(rough, Reconstruction)
    assert error(rough, photograph(14)) > 1e-3
    assert error(found, photograph(14)) < 1e-5
    assert found.verified
    assert found.knowledge == ()
    assert found.labels is not None
    assert found.labels.tolist() == [1]
    assert len(found.history) > 1
    assert found.objective == min(found.history) < 1e-5


def test_it_reaches_through_convolutions_and_pooling() -> None:
    view = victim(network(*POOLED), photograph(14), FedAvg(lr=0.01, steps=5))
    found = attack(view, "first-step+cascade")
    assert found.verified
    assert error(found, photograph(14)) < 1e-5


def test_one_step_is_left_to_the_other_attack() -> None:
    view = victim(LINEAR, photograph(14))
    found, plain = attack(view, "first-step+cascade"), attack(view)
    assert torch.equal(found.inputs, plain.inputs)  # type: ignore[arg-type]
    assert (found.verified, found.knowledge, found.objective) == (True, (), plain.objective)


def test_an_update_clipped_to_an_unknown_size_is_compared_in_direction() -> None:
    found = attack(seen(FedAvg(lr=3e-3, steps=5), defense=Clip(max_norm=1e-3)), "first-step+cascade")
    assert found.objective < 1e-5
    assert error(found, photograph(14)) < 1e-5


def test_long_steps_are_never_called_solved() -> None:
    image = photograph(14)
    view = victim(LINEAR, image, FedAvg(lr=0.05, steps=20))
    found = attack(view, "first-step+cascade")
    assert error(found, image) > 1e-2  # else this shows nothing
    assert found.verified is False
    assert ONE_STEP_SURROGATE in found.knowledge


def test_the_best_reconstruction_is_returned_and_no_correction_is_the_surrogate() -> None:
    view = victim(LINEAR, photograph(14), FedAvg(lr=3e-3, steps=5))
    bare = build({"name": "chain", "first": {"name": "first-step", "corrections": 0}, "then": "cascade"})(view)
    rough = build(UNCORRECTED)(view)
    assert isinstance(bare, Reconstruction)
    assert isinstance(rough, Reconstruction)
    torch.testing.assert_close(bare.inputs, rough.inputs, atol=1e-9, rtol=0)
    with pytest.raises(ValueError, match=r"first-step.corrections: expected a whole number >= 0"):
        FirstStep(corrections=-1)


def test_searches_on_several_images_gain_as_well() -> None:
    view = seen(FedAvg(lr=3e-3, steps=5, batch_size=None), images=2)
    search = {"name": "ig", "iterations": 30}
    first = {"name": "first-step", "corrections": 2}
    found = build({"name": "chain", "first": first, "then": search})(view)
    assert isinstance(found, Reconstruction)
    assert found.inputs is not None
    assert found.inputs.shape == (2, 1, 14, 14)
    assert len(found.history) == 3
    assert found.objective == min(found.history)


class Mixed(Attack):
    """Returns the true images of a batch turned round, without their labels."""

    def run(self, views: Sequence[ServerView], seeds: Sequence[int]) -> list[Result]:
        return [Reconstruction(inputs=pictures(3).flip(0), verified=True) for _ in views]


@pytest.mark.parametrize("threat", [{}, {"knows_labels": True}, {"knows_order": True}], ids=["none", "labels", "order"])
def test_images_that_come_in_another_order_are_put_in_their_places(threat: dict[str, bool]) -> None:
    work: dict[str, Any] = (
        {"batch_size": 1, "epochs": 2} if "knows_order" in threat else {"batch_size": None, "steps": 4}
    )
    (found,) = FirstStep().attack_rewritten(Mixed(), [seen(FedAvg(lr=3e-3, **work), images=3, **threat)], [0])
    assert isinstance(found, Reconstruction)
    assert found.objective < 1e-8
    assert found.labels is not None
    assert found.inputs is not None
    true = {int(label): image for label, image in zip(torch.arange(3), pictures(3), strict=True)}
    for image, label in zip(found.inputs, found.labels, strict=True):
        assert torch.equal(image, true[int(label)])
    assert found.knowledge == tuple(name.removeprefix("knows_") for name in threat)
    assert found.verified


def test_an_unknown_order_of_few_images_fed_once_each_is_found() -> None:
    """Small steps on one image each are a batch, but for what the network moves between."""
    (found,) = FirstStep().attack_rewritten(Mixed(), [seen(FedAvg(lr=3e-3, epochs=1, batch_size=1), images=3)], [0])
    assert isinstance(found, Reconstruction)
    assert found.objective < 1e-8
    assert found.knowledge == ()
    assert found.labels is not None
    assert found.labels.tolist() == [seen_label(image) for image in found.inputs]


def seen_label(image: Tensor) -> int:
    """Return the label of one of the three pictures."""
    (label,) = (i for i, one in enumerate(pictures(3)) if torch.equal(one, image))
    return label


def test_what_a_large_network_leaves_is_not_rounding_of_its_sums() -> None:
    large = {"weight": torch.rand(2**23, generator=stream(0, "large"))}
    twice = {"weight": 2 * large["weight"]}
    assert abs(_best_factor(twice, large) - 2) < 1e-12
    assert _missed_share(twice, large, 2.0) == 0


class Exact(Attack):
    """Returns the true image, all of it fixed, and counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def run(self, views: Sequence[ServerView], seeds: Sequence[int]) -> list[Result]:
        self.asked += 1
        return [Reconstruction(pictures(1), verified=True, fixed=torch.ones(1, 1, 14, 14, dtype=torch.bool))]


def test_an_image_that_is_fixed_and_explains_all_is_not_asked_for_again() -> None:
    single = seen(FedAvg(lr=3e-3, steps=3))
    noisy = replace(single, update={n: dense(v) * (1 + 5e-6 * (dense(v) > 0)) for n, v in single.update.items()})
    attack = Exact()
    (found,) = FirstStep().attack_rewritten(attack, [noisy], [0])
    assert isinstance(found, Reconstruction)
    assert found.verified
    assert 1e-6 < found.objective < 1e-5
    assert attack.asked == 1


def test_a_part_of_the_images_is_handed_on_without_a_claim() -> None:
    class Half(Attack):
        def run(self, views: Sequence[ServerView], seeds: Sequence[int]) -> list[Result]:
            return [Reconstruction(inputs=pictures(1), verified=True) for _ in views]

    view = seen(FedAvg(lr=3e-3, epochs=1, batch_size=1), images=3, knows_order=True)
    (found,) = FirstStep().attack_rewritten(Half(), [view], [0])
    assert isinstance(found, Reconstruction)
    assert found.verified is None
    assert ONE_STEP_SURROGATE in found.knowledge


def test_a_simulation_that_says_nothing_ends_the_search() -> None:
    view = seen(FedAvg(lr=3e-3, steps=5, batch_size=None), images=3)
    sure = {n: dense(w) * 1e6 if n.startswith("head") else w for n, w in view.shared.items()}
    (found,) = FirstStep().attack_rewritten(Mixed(), [replace(view, shared=sure)], [0])
    assert isinstance(found, Reconstruction)
    assert not found.verified


@pytest.mark.parametrize(
    ("view", "reason"),
    [
        (seen(FedPer(lr=3e-3, steps=5)), "the classifier is private"),
        (seen(FedAvg(lr=3e-3, epochs=2, batch_size=1), images=2), "their order is unknown"),
        (seen(FedAvg(lr=3e-3, steps=5, batch_size=None), knows_schedule=False), "local steps is unknown"),
        (replace(seen(FedAvg(lr=3e-3, steps=5)), update={}), "nothing is shared"),
    ],
    ids=["private", "order", "schedule", "nothing"],
)
def test_what_cannot_be_simulated_is_refused(view: ServerView, reason: str) -> None:
    result = build("first-step+ig")(view)
    assert isinstance(result, NotApplicable)
    assert reason in result.reason


def test_a_known_order_of_small_batches_is_simulated() -> None:
    view = seen(FedAvg(lr=3e-3, epochs=2, batch_size=1), images=2, knows_order=True)
    search = {
        "name": "chain",
        "first": {"name": "first-step", "corrections": 1},
        "then": {"name": "ig", "iterations": 5},
    }
    found = build(search)(view)
    assert isinstance(found, Reconstruction)
    assert len(found.history) == 2
