"""LTI: inverters learn from imitated clients, under the defense, and from nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, ClassVar

import pytest
import torch
from support import worlds
from support.compare import assert_same
from support.loud import Loud
from torch import Tensor

import attacks
from attacks import NotApplicable, Reconstruction
from attacks.learned import inversion_network, lti
from attacks.learned.inversion_network import FeatureHash, SimulatedClient, client_key, permutation_mse
from attacks.search_control import SearchControl, SearchProgress
from defenses import defenses
from defenses.precode import Precode
from eval.metrics.image import psnr
from eval.metrics.matching import assign
from fl.client import Client
from fl.data.sources.embedded import Faces
from fl.defense import Defense
from fl.method import Download
from fl.methods.fedavg import FedAvg
from fl.methods.fedper import FedPer
from fl.models import build as build_model
from fl.seeds import stream
from fl.simulation.client_round import ClientState, observe, prepare
from fl.tensors import dense
from fl.types import Batch, Task
from fl.view import ServerView, ThreatModel

DATA = Faces(size=8, test_share=0.1).load()
SETTINGS: dict[str, Any] = {
    "auxiliary": {"name": "faces", "size": 8, "test_share": 0.1},
    "part": "train",
    "iterations": 150,
    "batch_size": 16,
    "width": 64,
    "hash_size": 256,
    "lr": 3e-3,
}
TRUTH = DATA.test.inputs
CONSTANT = psnr(TRUTH.mean((2, 3), keepdim=True).expand_as(TRUTH), TRUTH)
"""What the best picture of one color scores, for each image."""
USUAL = psnr(DATA.train.inputs.mean(0, keepdim=True).expand_as(TRUTH), TRUTH)
"""What the mean of the public images scores."""


def view(index: list[int], defense: Defense | None = None, *, seed: int = 0, known: bool = True) -> ServerView:
    """One step on test images."""
    task = build_model("tiny", num_classes=2, seed=seed)
    client = Client(task, FedAvg(lr=0.1, steps=1, batch_size=None), defense or Defense())
    images = DATA.test.take(torch.tensor(index))
    download = Download(dict(task.parameters), dict(task.buffers))
    return observe(prepare(client, ClientState(), download, images), threat=ThreatModel(knows_defense=known))[0]


def pictures(views: list[ServerView], **settings: Any) -> Tensor:
    """All that the attack finds (N, C, H, W)."""
    results = attacks.build({"name": "lti", **SETTINGS, **settings}).run(views, [0] * len(views))
    return torch.cat([result.inputs for result in results])  # type: ignore[union-attr, misc]


def test_training_ends_when_it_has_to_and_is_not_kept_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lti, "_TRAINED", {})
    attack = attacks.build({"name": "lti", **SETTINGS, "iterations": 40})
    heard: list[SearchProgress] = []
    control = SearchControl(interval=0.0)

    def stop_at_five(progress: SearchProgress) -> None:
        heard.append(progress)
        if progress.iteration == 5:
            control.interrupt()

    control.on_progress = stop_at_five
    given = [view([0]), view([1]), view([2], seed=1)]
    cut, same, never = attack.run_controlled(given, [0, 1, 2], control)
    assert isinstance(cut, Reconstruction)
    assert cut.cut_short == same.cut_short
    assert cut.cut_short == "the training of the network was cut short by an interrupt after 5 of 40 iterations"
    assert cut.cut_short in cut.note
    assert never == NotApplicable(
        "no network was trained before an interrupt",
        limit=True,
        cut_short="no network was trained before an interrupt",
    )
    assert {progress.iterations for progress in heard} == {80}  # two networks
    assert lti._TRAINED == {}
    whole = attack(given[0], control=SearchControl())
    assert (whole.cut_short, len(lti._TRAINED)) == ("", 1)


def test_the_loss_takes_the_best_order() -> None:
    draw = stream(0, "loss")
    found, images = torch.rand(5, 4, 6, generator=draw), torch.rand(5, 4, 6, generator=draw)
    orders = [list(order) for order in permutations(range(4))]
    every = torch.stack([(found - images[:, order]).square().mean((1, 2)) for order in orders])
    torch.testing.assert_close(permutation_mse(found, images), every.amin(0).mean())
    assert float(permutation_mse(images[:, [2, 0, 3, 1]], images)) == 0
    assert float((images[:, [2, 0, 3, 1]] - images).square().mean()) > 0.01
    leaf = found.clone().requires_grad_()
    permutation_mse(leaf, images).backward()
    assert leaf.grad is not None
    assert leaf.grad.abs().flatten(2).amax(-1).all(), "every image gets a gradient"


def test_the_hash_deals_every_number_out_once_and_keeps_directions() -> None:
    rows = {"a": torch.eye(10, dtype=torch.float64)[:, :6].reshape(10, 2, 3), "b": torch.eye(10).double()[:, 6:]}
    hashed = FeatureHash({"a": 1.0, "b": 1.0}, 10, 4, 0)(rows)
    assert hashed.shape == (10, 4)
    assert hashed.abs().sum(1).tolist() == [1.0] * 10
    assert sorted(hashed.abs().sum(0).tolist()) == [2, 2, 3, 3]
    assert {-1.0, 1.0} <= set(hashed.flatten().tolist())
    update = {"a": torch.randn(1, 2, 3, generator=stream(0, "a")), "b": torch.randn(1, 4, generator=stream(0, "b"))}
    whole = FeatureHash({"a": 2.0, "b": 0.5}, 10, 10, 0)(update)
    plain = torch.cat([update["a"].flatten(1) * 2, update["b"] / 2], 1)
    torch.testing.assert_close(whole, plain / plain.norm())
    louder = FeatureHash({"a": 2.0 / 1024, "b": 0.5 / 1024}, 10, 10, 0)({name: x * 1024 for name, x in update.items()})
    assert torch.equal(whole, louder)


def test_it_reads_images_that_it_never_saw_and_signs_are_enough_for_one_who_knows_of_them() -> None:
    def found(defense: str, *, known: bool = True) -> Tensor:
        return psnr(pictures([view([i], defenses.build(defense), known=known) for i in range(len(TRUTH))]), TRUTH)

    plain, aware, unaware = found("none"), found("signsgd"), found("signsgd", known=False)
    assert float((plain - USUAL).mean()) > 5
    assert float((plain - CONSTANT).mean()) > 1  # some of these images are of one color, which no one can beat
    assert float((aware - USUAL).mean()) > 4
    assert float((aware - unaware).mean()) > 3


def test_it_reads_both_images_of_a_batch() -> None:
    both = torch.arange(len(TRUTH)).view(-1, 2)
    found = pictures([view(index) for index in both.tolist()])
    order = torch.cat([torch.tensor(assign(found[pair], TRUTH[pair])) + pair[0] for pair in both])
    assert float((psnr(found[order], TRUTH) - USUAL).mean()) > 2


@dataclass(frozen=True, kw_only=True)
class Negative(Defense):
    """The client feeds negatives."""

    name: ClassVar[str] = "negative"

    def transform_batch(self, batch: Batch, task: Task, generator: torch.Generator) -> Batch:
        return Batch(1 - batch.inputs, batch.labels)


@pytest.mark.parametrize("known", [True, False])
def test_an_imitation_does_what_the_client_does(known: bool) -> None:
    public = DATA.train

    def imitated(defense: Defense) -> tuple[Batch, dict[str, Tensor]]:
        imitation = SimulatedClient(view([0, 1], defense, known=known), public)
        images = imitation.images(3, stream(1, "images"))
        return images, imitation.updates(images, stream(1, "updates"))

    plain, sent = imitated(Defense())
    task = build_model("tiny", num_classes=2, seed=0)
    client = Client(task, FedAvg(lr=0.1, steps=1, batch_size=None))
    for i in range(3):
        batch = Batch(plain.inputs[i], plain.labels[i])
        real = observe(prepare(client, ClientState(), Download(dict(task.parameters)), batch))[0].update
        for name, value in real.items():
            torch.testing.assert_close(sent[name][i], dense(value), rtol=1e-5, atol=1e-7)
    negative, _ = imitated(Negative())
    torch.testing.assert_close(negative.inputs, 1 - plain.inputs if known else plain.inputs)
    pruned = imitated(defenses.build({"name": "prune", "ratio": 0.9}))[1]
    noisy = imitated(defenses.build({"name": "noise", "std": 1.0}))[1]
    name = "body.fc1.weight"
    assert (float((pruned[name] == 0).double().mean()) > 0.89) is known
    off = (noisy[name] - sent[name]).square().mean().sqrt() / sent[name].square().mean().sqrt()
    assert float(off) == pytest.approx(1.0 if known else 0.0, abs=0.1)


def test_what_the_client_keeps_is_drawn_anew_unless_its_start_is_known() -> None:
    run = worlds.federation(worlds.one_step(FedPer.example()))
    seen = run.observe(1, data=worlds.images(1, "victim"))[0]
    imitation = SimulatedClient(seen, worlds.images(4, "public"))
    drawn = imitation.images(2, stream(0, "images"))
    same = Batch(drawn.inputs[:1].expand(2, *drawn.inputs.shape[1:]), drawn.labels[:1].expand(2, -1))
    first, second = imitation.updates(same, stream(0, "updates"))[next(iter(seen.update))]
    assert not torch.equal(first, second)
    known = replace(seen, private_init={n: torch.ones(s, dtype=seen.dtype) for n, s in seen.private.items()})
    first, second = SimulatedClient(known, imitation.public).updates(same, stream(0, "updates"))[
        next(iter(seen.update))
    ]
    assert torch.equal(first, second)


def test_a_defenses_noise_is_imitated_at_its_own_size() -> None:
    seen = worlds.federation(worlds.one_step(FedAvg.example()), Precode(latent=256)).observe(1)[0]
    (name,) = seen.private
    noise = SimulatedClient(seen, worlds.images(4, "public"))._draw_private(name, 3, stream(0, "noise"))
    assert noise.shape == (3, 4, 256)
    assert abs(float(noise.std()) - 1) < 0.1


def test_one_network_serves_all_views_of_equal_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []

    def counted(*given: Any, **settings: Any) -> Any:
        trained.append(given)
        return inversion_network.train(*given, **settings)

    monkeypatch.setattr(lti, "train", counted)
    lti._TRAINED.clear()
    few: dict[str, Any] = {"iterations": 3}
    views = [view([0]), view([1]), view([0], seed=1), view([0], defenses.build("signsgd")), view([0, 1])]
    together = attacks.build({"name": "lti", **SETTINGS, **few}).run(views[:4], [0, 1, 2, 3])
    assert len(trained) == 3
    assert torch.equal(together[1].inputs, pictures(views[1:2], **few))  # type: ignore[union-attr, arg-type]
    assert len(trained) == 3
    lti._TRAINED.clear()
    alone = [pictures([one], **few) for one in views[:4]]
    assert len(trained) == 6
    assert_same(dict(enumerate(alone)), {i: r.inputs for i, r in enumerate(together)})  # type: ignore[misc, union-attr]
    assert not torch.equal(alone[0], alone[1])
    assert not torch.equal(alone[0], pictures(views[:1], **few, seed=1))
    prints = [client_key(each) for each in views]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 4
    assert len(lti._TRAINED) == lti.MAX_CACHED_NETWORKS


def test_neither_the_unit_of_the_update_nor_the_global_generator_matters() -> None:
    before = torch.get_rng_state()
    plain, loud = view([0]), view([0], Loud())
    assert torch.equal(dense(loud.update["head.weight"]), 1024 * dense(plain.update["head.weight"]))
    assert torch.equal(pictures([loud], iterations=20), pictures([plain], iterations=20))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("change", "settings", "words"),
    [
        (lambda v: v, {"auxiliary": None}, "name a data set"),
        (lambda v: v, {"auxiliary": {"name": "faces", "size": 9}}, r"the public ones \(1, 9, 9\)"),
        (lambda v: replace(v, schedule=None), {}, r"schedule is unknown.*surrogate\+"),
        (lambda v: replace(v, batch_size=None), {}, "number of images"),
        (lambda v: replace(v, update={n: 0 * dense(x) for n, x in v.update.items()}), {}, "zero"),
        (lambda v: replace(v, update={n: torch.nan * dense(x) for n, x in v.update.items()}), {}, "finite"),
    ],
)
def test_it_says_where_it_can_say_nothing(
    change: Callable[[ServerView], ServerView], settings: dict[str, Any], words: str
) -> None:
    result = attacks.build({"name": "lti", **SETTINGS, **settings})(change(view([0])))
    assert isinstance(result, NotApplicable)
    assert re.search(words, result.reason)


def test_a_part_without_images_teaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = replace(DATA, test=DATA.test.take(torch.arange(0)))
    monkeypatch.setattr(Faces, "load", lambda self: empty)
    result = attacks.build({"name": "lti", **SETTINGS, "part": "test"})(view([0]))
    assert isinstance(result, NotApplicable)
    assert "no images in its part 'test'" in result.reason


def test_what_the_imitation_knew_of_the_client_is_said() -> None:
    run = worlds.federation(worlds.one_step(FedPer.example()))
    threat = ThreatModel(knows_order=True, knows_randomness=True, knows_private_init=True)
    seen = run.observe(1, data=worlds.images(1, "victim"), threat=threat)[0]
    result = attacks.build({"name": "lti", **SETTINGS, "iterations": 3})(seen)
    assert isinstance(result, Reconstruction)
    assert result.knowledge == ("public images (faces, train)", "order", "draws", "private_init")


def test_images_of_other_classes_get_labels_at_random_and_the_result_names_them() -> None:
    task = build_model("tiny", num_classes=7, seed=0)
    client = Client(task, FedAvg(lr=0.1, steps=1, batch_size=None))
    images = Batch(DATA.test.inputs[:1], torch.tensor([6]))
    seen = observe(prepare(client, ClientState(), Download(dict(task.parameters)), images))[0]
    result = attacks.build({"name": "lti", **SETTINGS, "iterations": 3})(seen)
    assert isinstance(result, Reconstruction)
    assert result.knowledge == ("public images (faces, train)",)
    assert result.labels is not None  # of the image, off the classifier: not one of those drawn at random
    assert result.labels.tolist() == [6]
    assert result.history[0] == 1
    with pytest.raises(ValueError, match=r"width: expected a (whole )?number >= 1"):
        attacks.build({"name": "lti", "width": 0})
    with pytest.raises(ValueError, match=r"lr: expected a (whole )?number > 0"):
        attacks.build({"name": "lti", "lr": 0.0})
