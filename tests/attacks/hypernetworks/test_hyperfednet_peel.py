"""What HyperFedNet's update says of embeddings and filters, and what it can't."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from support import worlds
from support.compare import assert_near
from support.matrix import COLUMNS

import attacks
from attacks.base import NotApplicable, Reconstruction
from attacks.hypernetworks.filter_equations import FilterUpdate
from attacks.hypernetworks.hyperfednet_peel import HyperFedNetPeel, PartlyKnownWeights
from fl.client import Client
from fl.federation import Federation
from fl.methods.fedavg import FedAvg
from fl.methods.fedprox import FedProx
from fl.methods.hyperfednet import HyperFedNet
from fl.models.hypernetworks.filter_hypernetwork import Filters, basic_filters, embeddings_name, hidden_activations
from fl.parametrization import Parametrization
from fl.predict import predict
from fl.seeds import stream
from fl.tensors import dense
from fl.types import Candidate, Group, Phase, Task, Truth
from fl.view import ServerView, ThreatModel

NAME = "body.conv2.weight"
ONE = Filters(embedding=6, block=(4, 4))
TWO = Filters(embedding=9, block=(2, 4))
"""One and two basic filters for the second convolution, 4 to 4 channels, 3x3."""


def observed(
    filters: Filters, *, rounds: int = 0, knows: bool = False, images: int = 1, **settings: Any
) -> tuple[ServerView, Truth, Federation]:
    """One step on one image, unless settings say otherwise, of the network with two convolutions."""
    how = {"epochs": None, "steps": 1, "batch_size": None, "lr": 0.1} | settings
    method = HyperFedNet(parametrization=filters, **how)
    run = worlds.federation(method, task_=worlds.deeper(), rounds=rounds)
    view, truth = run.observe(0, data=worlds.images(images, "victim"), threat=ThreatModel(knows_private_init=knows))
    return view, truth, run


def name(filters: Filters) -> str:
    out, inside = filters.block or (4, 4)
    return embeddings_name((out, inside, 3, 3), NAME)


def gradient(task: Task, truth: Truth) -> torch.Tensor:
    """Of the loss with respect to the second convolution, by autograd through the network itself."""
    weights = {n: dense(v) for n, v in truth.private.items() if n in task.parameters} | truth.extractor
    weights = {n: v.clone().requires_grad_() for n, v in weights.items()}
    logits = torch.func.functional_call(task.model, weights, (truth.inputs,))
    return torch.autograd.grad(torch.nn.functional.cross_entropy(logits, truth.labels), weights[NAME])[0]


@pytest.mark.parametrize("rounds", [0, 2])
@pytest.mark.parametrize("images", [1, 4])
def test_a_single_filter_gives_its_embedding_and_gradient_away(rounds: int, images: int) -> None:
    view, truth, run = observed(ONE, rounds=rounds, images=images)
    result = HyperFedNetPeel()(view)
    assert isinstance(result, Reconstruction)
    assert result.inputs is None
    assert result.verified
    assert_near({"v": result.private[name(ONE)]}, {"v": truth.private[name(ONE)]}, 1e-10)
    assert_near({"w": result.private[f"extractor/{NAME}"]}, {"w": truth.extractor[NAME]}, 1e-10)
    easier = HyperFedNetPeel().rewrite(view)
    assert isinstance(easier, ServerView)
    assert isinstance(easier.method, PartlyKnownWeights)
    assert_near(easier.update, {NAME: gradient(run.client.base, truth)}, 1e-10)
    assert not any(n.startswith("embeddings.") for n in easier.private)


def test_the_plain_view_is_predicted_by_the_truth() -> None:
    view, truth, _ = observed(ONE)
    easier = HyperFedNetPeel().rewrite(view)
    assert isinstance(easier, ServerView)
    private = {n: v for n, v in truth.private.items() if n in easier.private}
    assert_near(predict(easier, Candidate(truth.inputs, truth.labels, private)), easier.update, 1e-9)


@dataclass(frozen=True, kw_only=True)
class Apart(FedAvg):
    """Everything but the hypernetwork has a step size, and a bound, of its own."""

    rest: Group = field(default_factory=lambda: Group(lr=0.3))
    split: str = "hypernet."

    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        (phase,) = super().phases(task, round)
        return (replace(phase, groups=(replace(phase.groups[0], prefixes=(self.split,)), self.rest)),)


def apart(**settings: Any) -> tuple[ServerView, Truth, Federation]:
    method = Apart(parametrization=replace(ONE, local=False), steps=1, batch_size=None, lr=0.1, **settings)
    run = worlds.federation(method, task_=worlds.deeper(), rounds=0)
    return *run.observe(0, data=worlds.images(1, "victim")), run


@pytest.mark.parametrize(
    ("rest", "known"), [(Group(lr=0.3), True), (Group(lr=0.3, max_norm=0.01), False), (Group(lr=0.0), False)]
)
def test_each_gradient_is_taken_at_its_own_step_size(rest: Group, known: bool) -> None:
    view, truth, run = apart(rest=rest)
    easier = HyperFedNetPeel().rewrite(view)
    assert isinstance(easier, ServerView)
    assert_near({NAME: easier.update[NAME]}, {NAME: gradient(run.client.base, truth)}, 1e-10)
    own = set(run.client.base.parameters) - {NAME}
    assert set(easier.update) - {NAME} == (own if known else set())
    assert_near(predict(easier, replace(truth.candidate(), private={})), easier.update, 1e-9)


def test_a_hypernetwork_in_parts_is_not_solved() -> None:
    result = HyperFedNetPeel()(apart(split="hypernet.4x4x3x3.in.weight")[0])
    assert isinstance(result, NotApplicable)
    assert "trained apart" in result.reason


def test_several_steps_are_never_confirmed() -> None:
    for steps in (2, 20):
        result = HyperFedNetPeel()(observed(ONE, rounds=1, steps=steps, lr=0.05 if steps == 20 else 0.01)[0])
        assert isinstance(result, Reconstruction)
        assert result.verified is False
    one = HyperFedNetPeel()(replace(observed(ONE, weight_decay=0.0)[0], schedule=None))
    assert isinstance(one, Reconstruction)
    assert one.verified


def test_several_filters_stay_mixed_unless_their_start_is_known() -> None:
    view, truth, run = observed(TWO)
    refused = HyperFedNetPeel()(view)
    assert isinstance(refused, NotApplicable)
    assert "2 filters share one hypernetwork" in refused.reason
    assert "2 numbers of their embeddings open" in refused.reason
    assert " unknowns)" in refused.reason
    view, truth, run = observed(TWO, knows=True)
    result = HyperFedNetPeel()(view)
    assert isinstance(result, Reconstruction)
    assert result.verified
    assert "private_init" in result.knowledge
    assert_near({"v": result.private[name(TWO)]}, {"v": truth.private[name(TWO)]}, 1e-8)
    easier = HyperFedNetPeel().rewrite(view)
    assert isinstance(easier, ServerView)
    assert_near(easier.update, {NAME: gradient(run.client.base, truth)}, 1e-8)


def test_before_the_first_round_known_starts_leave_nothing_private() -> None:
    view, truth, _ = observed(TWO, knows=True)
    easier = HyperFedNetPeel().rewrite(view)
    assert isinstance(easier, ServerView)
    assert easier.private == {}
    assert_near(predict(easier, Candidate(truth.inputs, truth.labels)), easier.update, 1e-8)
    result = HyperFedNetPeel()(view)
    assert isinstance(result, Reconstruction)
    assert "160 numbers for 65 unknowns" in result.knowledge
    found = attacks.build({"name": "filters+dlg", "iterations": 2})(observed(ONE, knows=True)[0])
    assert isinstance(found, Reconstruction)
    assert "private_init" in found.knowledge
    later = HyperFedNetPeel().rewrite(observed(ONE, rounds=1, knows=True)[0])
    assert isinstance(later, ServerView)
    assert "head.weight" in later.private


def test_later_the_nearest_points_of_the_hull_are_an_estimate() -> None:
    view, truth, run = observed(TWO, rounds=3, knows=True)
    result = HyperFedNetPeel()(view)
    assert isinstance(result, Reconstruction)
    assert not result.verified
    now, start = dense(truth.private[name(TWO)]), dense(run.private_init[name(TWO)])
    found = dense(result.private[name(TWO)])
    assert float((found - now).norm()) < float((start - now).norm())
    easier = HyperFedNetPeel().rewrite(view)
    assert isinstance(easier, ServerView)
    assert easier.method == view.method  # no plain view of an estimate
    assert easier.private_init is not None
    assert torch.equal(dense(easier.private_init[name(TWO)]), found)


def equations(filters: int, shape: tuple[int, int, int, int], size: int) -> tuple[FilterUpdate, Any, torch.Tensor]:
    """Made-up numbers: the update's equations as a function of embeddings and gradients, and these."""
    draw = stream(0, "equations")

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=draw, dtype=torch.float64)

    out, inside, height, width = shape
    n = out * height * width
    layers = (random(inside, size, size), random(inside, size), random(n, size), random(n))
    count = filters * size

    def change(numbers: torch.Tensor) -> torch.Tensor:
        v, g = numbers[:count].view(filters, size), numbers[count:].view(filters, *shape)
        moving = [w.clone().requires_grad_() for w in layers]
        value = (basic_filters(v, moving, shape) * g).sum()
        grads = torch.autograd.grad(value, moving, create_graph=True)
        return torch.cat([w.flatten() for w in grads])

    numbers = random(count + filters * inside * n)
    parts = change(numbers).detach().split([w.numel() for w in layers])
    moved = tuple(part.view(w.shape) for part, w in zip(parts, layers, strict=True))
    return FilterUpdate(shape, filters, layers, moved), change, numbers  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("filters", "shape", "size"),
    [(1, (2, 2, 1, 2), 3), (2, (2, 2, 1, 2), 5), (3, (2, 1, 2, 2), 2), (6, (2, 2, 1, 2), 2)],
)
def test_counts_are_the_rank_of_the_equations(filters: int, shape: Any, size: int) -> None:
    update, change, numbers = equations(filters, shape, size)
    jacobian = torch.autograd.functional.jacobian(change, numbers)
    sizes = torch.linalg.svdvals(jacobian)
    assert int((sizes > 1e-9 * sizes[0]).sum()) == update.independent_numbers


def test_mixed_embeddings_explain_the_update_as_well() -> None:
    update, change, numbers = equations(3, (2, 2, 1, 2), 7)
    v, g = numbers[:21].view(3, 7), numbers[21:].view(3, -1)
    mix = torch.tensor([[0.5, 0.3, 0.2], [0.1, 1.2, -0.3], [-0.4, 0.2, 1.2]], dtype=torch.float64)
    other = torch.cat([(mix @ v).flatten(), (torch.linalg.inv(mix).mT @ g).flatten()])
    assert_near({"": change(other)}, {"": change(numbers)}, 1e-12)
    assert update.undetermined_numbers == 6
    assert update.misfit(mix @ v) < 1e-12
    assert update.misfit(v + 0.1) > 1e-3


def test_gradients_follow_while_activations_are_independent() -> None:
    for filters, determined in ((2, True), (4, True), (5, False)):
        update, _, numbers = equations(filters, (2, 2, 1, 2), 7)  # 2 channels a filter, 8 dimensions
        v, g = numbers[: 7 * filters].view(filters, 7), numbers[7 * filters :].view(filters, 2, 2, 1, 2)
        found = update.gradient(v)
        assert (found is not None) is determined
        assert hidden_activations(v, update.layers[0], update.layers[1]).shape == (filters, 2, 7)
        if found is not None:
            assert_near({"": found}, {"": g}, 1e-9)
            assert update.gradient_misfit(v, found) < 1e-9
            assert update.gradient_misfit(1.1 * v, found) > 1e-3


def test_what_does_not_fit_is_not_confirmed() -> None:
    view, *_ = observed(ONE, epochs=4, steps=None, batch_size=2, images=4)
    result = HyperFedNetPeel()(view)
    assert isinstance(result, Reconstruction)
    assert not result.verified
    noisy = {n: dense(v) + 0.3 * dense(v).std() for n, v in observed(ONE)[0].update.items()}
    result = HyperFedNetPeel()(replace(observed(ONE)[0], update=noisy))  # type: ignore[arg-type]
    assert isinstance(result, Reconstruction)
    assert not result.verified


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("column", [name for name, defense in COLUMNS.items() if defense.group_size == 1])
def test_what_a_defense_has_changed_is_not_confirmed_unless_it_is_right(column: str, known: bool) -> None:
    method = HyperFedNet(parametrization=ONE, epochs=None, steps=1, batch_size=None, lr=0.1)
    run = worlds.federation(method, COLUMNS[column], worlds.deeper(), rounds=1)
    view, truth = run.observe(0, data=worlds.images(1, "victim"), threat=ThreatModel(knows_defense=known))
    result = HyperFedNetPeel()(view)
    if isinstance(result, NotApplicable):
        assert result.reason
    elif result.verified:
        assert_near({"v": result.private[name(ONE)]}, {"v": truth.private[name(ONE)]}, 1e-2)


def test_why_it_does_not_apply() -> None:
    def reason(view: ServerView) -> str:
        result = HyperFedNetPeel()(view)
        assert isinstance(result, NotApplicable)
        return result.reason

    plain = worlds.federation(HyperFedNet(parametrization=Parametrization(), epochs=1, batch_size=4))
    assert "nothing to peel" in reason(plain.observe(0)[0])
    view, share = observed(ONE)[0], 0.1 * 1.9 * 5e-4  # Nesterov's first step takes the gradient 1.9 times
    assert "no gradient" in reason(replace(view, update={n: dense(w) * share for n, w in view.shared.items()}))
    assert "schedule" in reason(replace(view, schedule=None, method=replace(view.method, steps=None, epochs=1)))
    prox = Client(worlds.deeper(), FedProx(parametrization=ONE, epochs=None, steps=2))
    run = Federation(prox, worlds.federation(HyperFedNet.example(), rounds=0).data)
    assert "gradient of its loss alone" in reason(run.observe(0)[0])


@pytest.mark.parametrize("spec", ["dlg", "joint", "filters+joint", "filters+dlg"])
def test_searches_run_on_hyperfednet(spec: str) -> None:
    view, truth, _ = observed(ONE)
    attack = attacks.build({"name": spec, "iterations": 3, "restarts": 1})
    result = attack(view, seed=0)
    assert isinstance(result, Reconstruction)
    assert result.inputs is not None
    assert result.inputs.shape == truth.inputs.shape
    if spec.startswith("filters+"):
        assert any("numbers for" in words for words in result.knowledge)
        assert_near({"v": result.private[name(ONE)]}, {"v": truth.private[name(ONE)]}, 1e-8)
        assert "private_init" not in result.knowledge


def test_idlg_finds_no_classifier_to_read_the_label_off() -> None:
    result = attacks.build("idlg")(observed(ONE)[0])
    assert isinstance(result, NotApplicable)
    assert "shared classifier" in result.reason
    run = observed(ONE)[2]
    known, _ = run.observe(0, data=worlds.images(1, "victim"), threat=ThreatModel(knows_labels=True))
    assert isinstance(attacks.build({"name": "idlg", "iterations": 2, "restarts": 1})(known), Reconstruction)
