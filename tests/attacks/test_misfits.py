"""A view whose update does not fit what the server sent: an error that names the tensor, not one from inside torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support import chains, worlds
from support.attacking import ATTACKS
from torch import Tensor, nn

from attacks.base import NotApplicable, Reconstruction, build
from attacks.labels.recovery import recover_labels
from attacks.update.classifier_update import classifier_tensors, is_sign_flipped
from attacks.update.observed_update import ObservedUpdate
from fl.capture import from_batch
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.models.building_blocks.layers import Normalize
from fl.seeds import stream
from fl.tensors import dense
from fl.view import ServerView, ThreatModel


def view_with(changed: Callable[[Tensor], Tensor]) -> tuple[ServerView, str]:
    """A view with the last tensor of its update changed, and that tensor's name."""
    view = worlds.federation(FedAvg(lr=0.1, steps=1, batch_size=None)).observe(0)[0]
    name = list(view.update)[-1]
    return replace(view, update=view.update | {name: changed(dense(view.update[name]))}), name


@pytest.mark.parametrize("attack", ["ig", "dlg", "cascade", "analytic", "surrogate+ig"])
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda value: value[:-1], "in the shape of what the server sent"),
        (lambda value: value.half(), "in the type of what the server sent, torch.float64, got torch.float16"),
        (lambda value: value.to_sparse(), "as a dense tensor, got torch.sparse_coo; call .to_dense()"),
        (lambda value: value + 0j, "in a floating-point type, got torch.complex128; an update has no"),
        (lambda value: value.numpy(), "as a tensor, got ndarray"),
    ],
    ids=["shape", "type", "sparse", "complex", "array"],
)
def test_an_update_that_does_not_fit_is_refused_by_name(
    attack: str, changed: Callable[[Tensor], Tensor], said: str
) -> None:
    view, name = view_with(changed)
    with pytest.raises(ValueError, match=re.escape(f"'{name}' {said}")):
        build(attack)(view)


def test_one_that_fits_is_not() -> None:
    view, _ = view_with(torch.clone)
    assert isinstance(build({"name": "ig", "iterations": 1})(view), Reconstruction)


def test_a_number_of_images_below_one_is_refused() -> None:
    view, _ = view_with(torch.clone)
    with pytest.raises(ValueError, match="expected batch_size >= 1"):
        build("analytic")(replace(view, batch_size=0))


@pytest.mark.parametrize("attack", ["ig", "analytic", "cascade"])
@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([3], "expected labels as a tensor int64, got list"),
        (torch.tensor([3, 1]), "expected a label for each of 1 images, got 2"),
        (torch.tensor([99]), "expected labels in [0, 5), got [99]"),
        (torch.tensor([-1]), "expected labels in [0, 5), got [-1]"),
        (torch.tensor([3.0]), "expected labels int64 (N,), or probabilities (N, 5), got torch.float32 (1,)"),
        (torch.eye(4)[:1], "expected labels int64 (N,), or probabilities (N, 5), got torch.float32 (1, 4)"),
    ],
    ids=["list", "two", "too large", "negative", "float", "of four classes"],
)
def test_labels_that_are_not_the_images_are_refused(attack: str, labels: Tensor, said: str) -> None:
    model = chains.initialized(nn.Sequential(nn.Flatten(), nn.Linear(64, 5)))
    view = from_batch(model, torch.rand(1, 1, 8, 8).double(), torch.tensor([1]))[0]
    with pytest.raises(ValueError, match=re.escape(said)):
        build(attack)(replace(view, labels=labels))
    build("analytic")(replace(view, labels=torch.tensor([1])))
    build("analytic")(replace(view, labels=torch.eye(5)[:1]))


def test_a_client_that_fed_no_image_is_not_refused_but_not_found_out() -> None:
    model = chains.initialized(nn.Sequential(nn.Flatten(), nn.Linear(64, 5)))
    view = from_batch(model, torch.rand(1, 1, 8, 8).double(), torch.tensor([1]))[0]
    view = replace(view, batch_size=0, schedule=(((0,),),))
    assert build("analytic")(view) == NotApplicable("no image was fed")


@pytest.mark.parametrize("name", list(ATTACKS))
def test_a_client_that_fed_no_image_is_not_refused_where_its_schedule_is_hidden(name: str) -> None:
    """Nothing says then that some were fed: with Poisson sampling a round may come to none."""
    method = FedAvg(lr=0.1, steps=1, batch_size=1, sampler="poisson")
    run = worlds.federation(method)
    view = run.observe(0, threat=ThreatModel(knows_schedule=False))[0]
    assert view.schedule is None
    still = {n: torch.zeros_like(dense(v)) for n, v in view.update.items()}
    for update in (still, view.update):
        assert isinstance(ATTACKS[name](replace(view, batch_size=0, update=update)), NotApplicable)
    with pytest.raises(ValueError, match="expected batch_size >= 1"):
        ATTACKS[name](replace(view, batch_size=-1))


@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
@pytest.mark.parametrize("attack", ["peel", "peel+ig"])
def test_a_hypernetworks_update_that_is_not_finite_is_not_opened(attack: str, odd: float) -> None:
    view = worlds.federation(HyperFL(lr=0.1, steps=1, batch_size=None, head_epochs=0)).observe(0)[0]
    name = next(iter(view.update))
    result = build(attack)(replace(view, update={**view.update, name: dense(view.update[name]) * odd}))
    assert isinstance(result, NotApplicable)
    assert "not finite" in result.reason


@pytest.mark.parametrize(
    "setting",
    [
        {"lr": math.nan},
        {"lr": math.inf},
        {"tv_weight": math.nan},
        {"max_step": math.nan},
        {"max_step": 0.0},
        {"last_lr": 2.0},
        {"memory_limit_gib": math.nan},
        {"success_threshold": math.inf},
        {"success_threshold": math.nan},
    ],
)
def test_settings_of_searches_are_finite(setting: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"(expected |ig.){next(iter(setting))}"):
        build({"name": "ig", **setting})


def test_infinity_is_no_limit() -> None:
    view = view_with(torch.clone)[0]
    for name in ("ig", "dlg"):
        search = {"name": name, "iterations": 30, "restarts": 2}
        wide = build({**search, "memory_limit_gib": math.inf, "max_step": math.inf})(view)
        large = build({**search, "memory_limit_gib": 1e6, "max_step": 1e6})(view)
        assert isinstance(wide, Reconstruction)
        assert isinstance(large, Reconstruction)
        assert wide.inputs is not None
        assert large.inputs is not None
        assert torch.equal(wide.inputs, large.inputs)


@pytest.mark.parametrize(
    ("attack", "settings"),
    [
        ("bilevel", ("lr", "lower_lr", "head_lr", "tv_weight")),
        ("gradinversion", ("energy_weight", "statistics_weight", "first_layer_factor", "group_weight")),
        ("latent-payload", ("lr", "tv_weight")),
        ("lti", ("lr",)),
        ("analytic", ("fits",)),
        ("spear", ("fits",)),
    ],
)
def test_settings_of_all_attacks_are_finite(attack: str, settings: tuple[str, ...]) -> None:
    for name in settings:
        for odd in (math.nan, math.inf, -1.0):
            with pytest.raises(ValueError, match=f"{attack}.{name}: expected a"):
                build({"name": attack, name: odd})


def test_a_dark_picture_is_not_verified_a_level_off() -> None:
    """Errors are relative to normalized numbers, which of a dark picture are far larger than its pixels."""
    layers = [Normalize((0.5,), (0.25,)), nn.Conv2d(1, 12, 5, 2, 2), nn.Sigmoid(), nn.Conv2d(12, 12, 5, 1, 2)]
    layers += [nn.Sigmoid(), nn.Conv2d(12, 12, 5, 1, 2), nn.Sigmoid(), nn.Flatten(), nn.Linear(192, 5)]
    model = chains.initialized(nn.Sequential(*layers), seed=4).float()
    image = 0.02 * torch.rand(1, 1, 8, 8, generator=stream(4, "d"))
    view = from_batch(model, image, torch.tensor([1]))[0]
    rough = {n: dense(v).half().float() for n, v in view.update.items()}
    result = build("rgap")(replace(view, update=rough, rounded=False))
    assert isinstance(result, Reconstruction)
    assert result.inputs is not None
    assert result.objective < 1e-3
    assert float((result.inputs - image).abs().max()) > 0.49 / 255
    assert not result.verified


def test_a_search_that_compared_nothing_says_so() -> None:
    model = chains.initialized(nn.Sequential(nn.Flatten(), nn.Linear(64, 5))).float()
    view = from_batch(model, torch.rand(1, 1, 8, 8), torch.tensor([1]))[0]
    small = replace(view, update={n: 1e-30 * dense(v) for n, v in view.update.items()})
    search = {"name": "ig", "iterations": 5}
    assert isinstance(build({**search, "objective": "cosine"})(small), Reconstruction)
    result = build({**search, "objective": "l2"})(small)
    assert isinstance(result, NotApplicable)
    assert "objective (l2) of no iterate is a finite number" in result.reason


def own(forward: Callable[[nn.Module, Tensor], Tensor]) -> ServerView:
    """What a network of 8 x 8 gray images sends whose forward is given."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 12), nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            return forward(self, x)

    model = chains.initialized(Own())
    return from_batch(model, torch.rand(1, 1, 8, 8).double(), torch.tensor([1]))[0]


@pytest.mark.parametrize("attack", ["cascade", "rconv"])
def test_what_a_forward_does_by_itself_is_followed(attack: str) -> None:
    result = build(attack)(own(lambda net, x: net.last(torch.relu(net.first(x.flatten(1))))))  # type: ignore[operator]
    assert isinstance(result, Reconstruction)
    assert result.verified


@pytest.mark.parametrize("attack", ["analytic", "rconv"])
def test_a_turned_update_gives_no_label(attack: str) -> None:
    model = chains.initialized(nn.Sequential(nn.Flatten(), nn.Linear(64, 5)))
    view = from_batch(model, torch.rand(1, 1, 8, 8).double(), torch.tensor([1]))[0]
    right, turned = (
        build(attack)(replace(view, update={n: mark * dense(v) for n, v in view.update.items()})) for mark in (1, -1)
    )
    assert isinstance(right, Reconstruction)
    assert right.labels is not None
    assert right.labels.tolist() == [1]
    assert isinstance(turned, Reconstruction)
    assert turned.labels is None
    assert "sign of the update" in turned.note
    assert "sign of the update" not in right.note


@pytest.mark.parametrize("attack", ["ig", "dlg", "idlg", "gradinversion", "surrogate+ig"])
@pytest.mark.parametrize("images", [1, 2])
def test_a_search_on_a_turned_update_says_so_and_names_no_label(attack: str, images: int) -> None:
    model = chains.initialized(nn.Sequential(nn.Flatten(), nn.Linear(64, 5)))
    given = torch.rand(images, 1, 8, 8, generator=stream(0, "image")).double()
    search = build({"name": attack, "iterations": 2})
    for method in (None, FedAvg(lr=0.1, steps=2, batch_size=None, weight_decay=0.1)):
        view = from_batch(model, given, torch.arange(images), method=method)[0]
        turned = replace(view, update={n: -dense(v) for n, v in view.update.items()})
        if method is not None:  # its decay is of the right sign: as if the client had trained uphill
            decay = {n: ObservedUpdate(view).decay_shares[n] * dense(v) for n, v in view.shared.items()}
            turned = replace(view, update={n: 2 * decay[n] - dense(v) for n, v in view.update.items()})
        for known in (None, torch.arange(images)):
            found = search(replace(turned, labels=known))
            if attack == "idlg" and images == 1 and known is None:
                assert isinstance(found, NotApplicable)  # it would take the label for known
                assert "sign of the update" in found.reason
                continue
            assert isinstance(found, Reconstruction)
            assert "sign of the update" in found.note
            assert found.labels is known
        right = search(view)
        assert isinstance(right, Reconstruction)
        assert "sign of the update" not in right.note


def test_a_network_that_turns_its_logits_round_is_searched() -> None:
    """Of such a one a right update looks like a turned one."""
    given = own(lambda net, x: -net.last(torch.relu(net.first(x.flatten(1)))))  # type: ignore[operator]
    assert classifier_tensors(given, given.update)[1] is not None
    assert is_sign_flipped(classifier_tensors(given, given.update)[1])  # type: ignore[arg-type]
    assert recover_labels(ObservedUpdate(given)) is None
    assert isinstance(build({"name": "ig", "iterations": 2})(given), Reconstruction)


def test_a_class_that_is_out_of_the_question_is_no_sign_of_a_turned_update() -> None:
    """Its share of the bias's gradient is less than decay or rounding: no more than one class seems to have risen."""
    model = chains.initialized(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)))
    model[1].bias.data = torch.tensor([-30.0, 0.1, 0.0]).double()  # type: ignore[union-attr,index]
    method = FedAvg(lr=0.1, steps=1, batch_size=None, weight_decay=1e-6)
    image = torch.rand(1, 1, 8, 8, generator=stream(0, "image")).double()
    view = from_batch(model, image, torch.tensor([2]), method=method)[0]
    assert is_sign_flipped(classifier_tensors(view, view.update)[1])  # type: ignore[arg-type]
    for attack in ("analytic", "rconv"):
        result = build(attack)(view)
        assert isinstance(result, Reconstruction)
        assert result.labels is not None
        assert result.labels.tolist() == [2]
        assert not result.note


def test_what_may_be_of_more_images_or_rounding_is_no_turned_update() -> None:
    signal = torch.tensor([0.9, -0.5, -0.4])
    assert is_sign_flipped(signal)
    assert not is_sign_flipped(signal, images=2)
    assert not is_sign_flipped(torch.tensor([0.9, -0.9, -1e-8, -1e-8]), rounding=1e-7)
    assert not is_sign_flipped(-signal)


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_padding_by_name_is_undone(padding: str) -> None:
    layers = (nn.Conv2d(1, 12, 3, padding=padding), nn.LeakyReLU(0.2), nn.Flatten())
    size = nn.Sequential(*layers)(torch.zeros(1, 1, 8, 8)).numel()
    model = chains.initialized(nn.Sequential(*layers, nn.Linear(size, 20), nn.LeakyReLU(0.2), nn.Linear(20, 3)))
    image = torch.rand(1, 1, 8, 8, generator=stream(0, "image")).double()
    view = from_batch(model, image, torch.tensor([1]))[0]
    for attack in ("cascade", "rconv"):
        result = build(attack)(view)
        assert isinstance(result, Reconstruction), result
        assert result.verified
        assert result.inputs is not None
        assert float((result.inputs - image).abs().max()) < 1e-4
