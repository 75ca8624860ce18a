"""Images named by features of the attacked network and by the update itself: what is told, what can't be, and why."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import worlds
from support.matrix import ROWS, shares
from torch import Tensor, nn

from attacks import Reconstruction
from attacks.hypernetworks.peel import HypernetPeel
from defenses.dp_sgd import DPSGD
from defenses.mixup import Mixup
from defenses.noise import Noise
from defenses.prune import Prune
from defenses.signsgd import SignSGD
from eval.metrics import identification
from eval.metrics.lineup import AMONG, BY_FEATURES, BY_PICTURE, BY_UPDATE, IdentificationLineup
from eval.metrics.score import Row
from fl.capture import from_batch
from fl.client import Client
from fl.defense import Defense
from fl.federation import ClientData, Federation
from fl.method import Method
from fl.methods.dp_fedavg import DPFedAvg
from fl.methods.fedavg import FedAvg
from fl.methods.fedbn import FedBN
from fl.methods.fedper import FedPer
from fl.methods.hyperfl import HyperFL
from fl.models import build
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
from fl.predict import predict
from fl.seeds import stream
from fl.simulation.client_round import observe, prepare
from fl.types import Batch, Truth
from fl.view import ServerView, ThreatModel

STEP = FedAvg(lr=0.1, steps=1, batch_size=None)
POOL = worlds.images(60, "pool")
POOL = Batch(POOL.inputs, torch.zeros_like(POOL.labels))


def victim(
    method: Method, n: int = 1, defense: Defense | None = None, rounds: int = 0, seed: int = 0, **threat: Any
) -> tuple[ServerView, Truth]:
    """One client of `n` images of class 0."""
    data = worlds.images(n, "victim", seed)
    data = Batch(data.inputs, torch.zeros_like(data.labels))
    run = Federation(Client(worlds.task(), method, defense or Defense()), [ClientData(data, data)], seed=seed)
    for _ in range(rounds):
        run.run_round()
    return run.observe(0, threat=ThreatModel(**threat))


def told(view: ServerView, truth: Truth, inputs: Tensor | None = None, **found: Any) -> list[Row]:
    """The rows of an attack that found `inputs`, in the order of the truth."""
    count = len(truth.inputs)
    rows = [{"image": i, "matched": None if inputs is None else i} for i in range(count)]
    return IdentificationLineup.of(view, truth, POOL, 0).rows(rows, Reconstruction(inputs=inputs, **found))


# ---- by the update ---------------------------------------------------------------------------------------------------
PROBES = [Defense(), Noise(std=1e-4), Prune(ratio=0.7), DPSGD(clip=0.1, noise_multiplier=1e-3)]


@pytest.mark.parametrize(
    ("defense", "knows"), [*((one, True) for one in (*PROBES, SignSGD())), *((one, False) for one in PROBES)]
)
def test_the_update_names_its_image_without_a_reconstruction(defense: Defense, knows: bool) -> None:
    views = [victim(STEP, defense=defense, seed=seed, knows_defense=knows) for seed in range(6)]
    rows = [row for view, truth in views for row in told(view, truth)]
    assert sum(row[BY_UPDATE] for row in rows) == 6
    assert {row[AMONG] for row in rows} == {50}
    assert not any(BY_PICTURE in row or BY_FEATURES in row for row in rows)


def test_noise_of_a_private_method_hides_it_and_too_little_does_not() -> None:
    hits = {}
    for noise in (0.0, 1e-2, 100.0):
        method = DPFedAvg(noise_multiplier=noise, clip=1.0, steps=1, batch_size=1, images=12, lr=0.1)
        views = [victim(method, seed=seed) for seed in range(4)]
        hits[noise] = sum(told(*view)[0][BY_UPDATE] for view in views)
    assert hits[0.0] == hits[1e-2] == 4
    assert hits[100.0] <= 1


def test_rounding_decides_nothing_where_noise_dwarfs_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million parameters, updates of length 1 and on every parameter noise of that size."""
    view, _ = victim(STEP)
    generator = stream(0, "test", "rounding")
    images = torch.arange(8.0).view(-1, 1, 1, 1).expand(-1, 1, 8, 8)
    sent = [one / one.norm() for one in torch.randn(8, 1_000_000, generator=generator)]
    monkeypatch.setattr(identification, "predict", lambda _, candidate: {"w": sent[int(candidate.inputs[0, 0, 0, 0])]})
    named, likeliest = [], []
    for _ in range(12):
        noisy = sent[0] + torch.randn(1_000_000, generator=generator)
        seen = replace(view, update={"w": noisy})
        scores = [float(noisy.double() @ one.double() - one.double().square().sum() / 2) for one in sent]
        likeliest.append(max(range(8), key=scores.__getitem__))
        named.append(identification.is_closest_in_update(seen, 0, images[0], images[1:]))
    assert named == [i == 0 for i in likeliest]
    assert 0 in likeliest


def test_one_candidate_s_update_is_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a dense hypernetwork one has 60 MB, so fifty would need 3 GB."""
    view, truth = victim(STEP)
    held, most = [], []

    def counted(*given: Any) -> Any:
        most.append(sum(one() is not None for one in held))
        made = predict(*given)
        held.append(weakref.ref(made["head.weight"]))
        return made

    monkeypatch.setattr(identification, "predict", counted)
    assert told(view, truth)[0][BY_UPDATE] is True
    assert len(held) == 50
    assert max(most) <= 1


def test_several_images_of_one_step_are_named_by_direction() -> None:
    rows = [row for seed in range(6) for row in told(*victim(STEP, 2, seed=seed))]
    hits = sum(row[BY_UPDATE] for row in rows)
    assert hits > 4  # of 12; by chance one in fifty


def test_an_update_that_says_nothing_names_nobody() -> None:
    """All candidates' updates are zero and equally far: a tie, though the true one stands first."""
    view, truth = victim(replace(STEP, lr=0.0))
    assert told(view, truth)[0][BY_UPDATE] is False
    view, truth = victim(replace(STEP, lr=0.0), knows_defense=False)
    assert told(view, truth)[0][BY_UPDATE] is False


@pytest.mark.parametrize(
    ("method", "settings", "reason"),
    [
        (FedPer(lr=0.1, steps=1, batch_size=None), {}, "keeps to itself (head.weight)"),
        (replace(STEP, steps=2), {}, "one local step, got 2"),
        (STEP, {"knows_schedule": False}, "number of local steps is unknown"),
        (STEP, {"defense": Mixup()}, ""),
    ],
)
def test_it_says_why_an_update_names_nobody(method: Method, settings: dict[str, Any], reason: str) -> None:
    view, truth = victim(method, 2, **settings)
    for row in told(view, truth):
        if reason:
            assert row[BY_UPDATE] is None
            assert reason in row["missing"][BY_UPDATE]
        else:
            assert BY_UPDATE not in row  # labels are mixed: no class to have others of


@pytest.mark.parametrize("small", [nn.Flatten(), nn.AvgPool2d(8)])
def test_a_network_that_takes_no_single_image_costs_an_attack_nothing(small: nn.Module) -> None:
    norm = (
        (nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4)) if isinstance(small, nn.Flatten) else (nn.BatchNorm2d(1),)
    )
    model = nn.Sequential(small, *norm, nn.Flatten(), nn.LazyLinear(3)).double()
    data = worlds.images(4, "victim")
    model(data.inputs)  # sizes the classifier
    view, truth = from_batch(model.train(), data.inputs, torch.zeros(4, dtype=torch.int64))
    rows = told(view, truth, truth.inputs)
    assert [row[BY_PICTURE] for row in rows] == [True] * 4
    assert [row[BY_UPDATE] for row in rows] == [None] * 4
    assert all(
        "a step on one image alone can't be computed (expected 2 images or more" in row["missing"][BY_UPDATE]
        for row in rows
    )


def test_a_classifier_known_from_the_start_is_known_in_the_first_round_only() -> None:
    method = FedPer(lr=0.1, steps=1, batch_size=None)
    assert told(*victim(method, knows_private_init=True))[0][BY_UPDATE] is True
    later = told(*victim(method, rounds=1, knows_private_init=True))[0]
    assert "keeps to itself" in later["missing"][BY_UPDATE]


def test_nothing_of_the_truth_but_the_candidates_is_looked_at() -> None:
    view, truth = victim(FedPer(lr=0.1, steps=1, batch_size=None), knows_private_init=True)
    blind = replace(truth, private={n: v * torch.nan for n, v in truth.private.items()})
    assert told(view, blind)[0][BY_UPDATE] is True


# ---- by features -----------------------------------------------------------------------------------------------------
def test_features_name_what_pixels_miss() -> None:
    image, others = victim(STEP)[1].inputs[0], POOL.inputs[:9]
    turned = image.flip(-1)

    def brightness(images: Tensor) -> Tensor:
        return images.mean((2, 3))

    assert identification.is_closest_in_features(brightness, turned, image, others)
    assert not identification.is_closest_in_pixels(turned, image, others)
    assert not identification.is_closest_in_features(brightness, others[3], image, others)
    assert not identification.is_closest_in_features(brightness, torch.full_like(image, torch.nan), image, others)
    assert not identification.is_closest_in_features(
        lambda images: 0 * brightness(images), image, image, others
    )  # a tie


def test_rows_say_which_way_named_an_image() -> None:
    view, truth = victim(STEP)
    found = {how: told(view, truth, inputs)[0] for how, inputs in (("right", truth.inputs), ("wrong", POOL.inputs[:1]))}
    assert found["right"][BY_PICTURE] is found["right"][BY_FEATURES] is True
    assert found["wrong"][BY_PICTURE] is found["wrong"][BY_FEATURES] is False
    lost = IdentificationLineup.of(view, truth, POOL, 0).rows(
        [{"image": 0, "matched": None}], Reconstruction(inputs=truth.inputs)
    )
    assert lost[0][BY_PICTURE] is lost[0][BY_FEATURES] is False


def test_features_are_what_the_classifier_is_given() -> None:
    view, truth = victim(STEP, 3, rounds=1)
    features = identification.classifier_features(view, {})
    assert not isinstance(features, str)
    made = features(truth.inputs)
    logits = torch.func.functional_call(view.task.model, {**view.shared}, (truth.inputs,))  # type: ignore[arg-type]
    head = view.shared["head.weight"], view.shared["head.bias"]
    assert torch.allclose(torch.nn.functional.linear(made, *head), logits)  # type: ignore[arg-type]


def test_a_private_extractor_has_features_once_it_is_recovered() -> None:
    view, truth = victim(HyperFL(steps=1, head_epochs=0, batch_size=None, parametrization=Hypernetwork.example()))
    (row,) = told(view, truth, truth.inputs)
    assert row[BY_FEATURES] is None
    assert "neither sent as such nor recovered" in row["missing"][BY_FEATURES]
    found = HypernetPeel()(view)
    assert isinstance(found, Reconstruction)
    assert told(view, truth, truth.inputs, private=found.private)[0][BY_FEATURES] is True


def test_a_network_that_is_all_classifier_has_its_images_for_features() -> None:
    task = build("linear", num_classes=3, input_shape=[1, 8, 8])
    data = worlds.images(1, "victim")
    data = Batch(data.inputs.float(), data.labels)
    view, truth = Federation(Client(task, STEP), [ClientData(data, data)]).observe(0)
    features = identification.classifier_features(view, {})
    assert not isinstance(features, str)
    assert torch.equal(features(truth.inputs), truth.inputs.flatten(1))


def test_private_statistics_leave_features_unknown() -> None:
    task = worlds.normed()
    data = worlds.images(2, "victim")
    view, _ = Federation(Client(task, FedBN(lr=0.1, steps=1)), [ClientData(data, data)]).observe(0)
    assert isinstance(identification.classifier_features(view, {}), str)
    known = identification.classifier_features(replace(view, shared={**view.shared, **task.parameters}), {})
    assert isinstance(known, str)
    assert "statistics" in known


# ---- together --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [name for name in ROWS if shares(name)])
def test_every_method_is_answered(name: str) -> None:
    probe = ROWS[name]
    run = worlds.federation(probe.method, probe.defense, probe.task, rounds=0)
    client = Client(run.client.base, worlds.one_step(run.client.method), run.client.defense)
    image = worlds.images(1, "victim")
    view, truth, _ = observe(prepare(client, run.clients[1], run.download(1), image))
    pool = Batch(POOL.inputs[:5], image.labels.expand(5))
    rows = IdentificationLineup.of(view, truth, pool, 0).rows(
        [{"image": 0, "matched": 0}], Reconstruction(inputs=truth.inputs)
    )
    for row in rows:
        if AMONG not in row:
            assert truth.labels.ndim > 1
            continue
        assert row[BY_PICTURE] is True
        for way in (BY_FEATURES, BY_UPDATE):
            assert isinstance(row[way], bool) != (way in row.get("missing", {}))


def test_the_update_is_asked_once_for_all_attacks(monkeypatch: pytest.MonkeyPatch) -> None:
    view, truth = victim(STEP)
    lineup = IdentificationLineup.of(view, truth, POOL, 0)
    first = lineup.rows([{"image": 0, "matched": None}], Reconstruction(inputs=None))
    monkeypatch.setattr("eval.metrics.lineup.is_closest_in_update", lambda *_: pytest.fail("asked a second time"))
    assert lineup.rows([{"image": 0, "matched": None}], Reconstruction(inputs=None)) == first
