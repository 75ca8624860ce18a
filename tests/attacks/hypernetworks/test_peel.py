"""The peel: exact where it is exact, and told apart from where it is not."""

from dataclasses import replace
from typing import Literal

import pytest
import torch
from support import worlds
from support.compare import assert_near
from support.cover import one_at_a_time, pairwise
from support.residual import assert_exact, pictures
from support.residual import victim as residual_network

from attacks import NotApplicable, Reconstruction
from attacks.base import Attack, build
from attacks.hypernetworks.peel import MAX_RESIDUAL, HypernetPeel, SolvedHypernet
from defenses.noise import Noise
from defenses.prune import Prune
from defenses.secagg import SecAgg
from fl.client import Client
from fl.defense import Defense
from fl.federation import ClientData, Federation
from fl.local.weight_decay import decay_shares
from fl.methods.fedavg import FedAvg
from fl.methods.fedper import FedPer
from fl.methods.hyperfl import HyperFL
from fl.models import build as network
from fl.models.hypernetworks.hyperfl_hypernetwork import EMBEDDING, TRUNK_BIAS, TRUNK_WEIGHT, Hypernetwork, head_bias
from fl.predict import predict
from fl.seeds import stream
from fl.tensors import LowRank, dense, sub
from fl.types import Batch, Candidate, Task, Truth
from fl.view import ServerView, ThreatModel

TINY = Hypernetwork(embedding=8, hidden=16, init="scaled")
NARROW = Hypernetwork(embedding=32, hidden=32, init="scaled")
STEP = HyperFL(steps=1, head_epochs=0, batch_size=None, parametrization=TINY)


def victim(
    task: Task,
    method: HyperFL | FedAvg,
    n: int = 1,
    *,
    dead: bool = False,
    defense: Defense | None = None,
    **threat: bool,
) -> tuple[ServerView, Truth]:
    some = next(iter(task.parameters.values()))
    images = torch.rand(n, *task.input_shape, generator=stream(0, "images")).to(some)
    data = Batch(images, torch.randint(0, task.num_classes, (n,), generator=stream(0, "labels")))
    run = Federation(Client(task, method, defense or Defense()), [ClientData(data, data)])
    if dead:
        shared = run.server.shared
        run.server = replace(run.server, shared={**shared, TRUNK_BIAS: shared[TRUNK_BIAS] * 0 - 100.0})
    return run.observe(0, threat=ThreatModel(**threat))


def uploaded(view: ServerView) -> ServerView:
    """The same update as the difference of two dense models, rounded as they are."""
    return replace(view, update={n: dense(view.shared[n]) - sub(view.shared[n], u) for n, u in view.update.items()})


def off(found: Reconstruction, truth: Truth) -> tuple[float, float]:
    """Relative errors of extractor and embedding."""
    pairs = [(found.private[f"extractor/{n}"], w) for n, w in truth.extractor.items()]
    pairs = [(dense(x).flatten(), w.flatten()) for x, w in pairs]
    mine, theirs = (torch.cat(list(side)) for side in zip(*pairs, strict=True))
    v, w = dense(found.private[EMBEDDING]), dense(truth.private[EMBEDDING])
    return float((mine - theirs).norm() / theirs.norm()), float((v - w).norm() / w.norm())


@pytest.mark.parametrize("dense_upload", [False, True])
@pytest.mark.parametrize("max_norm", [50.0, 0.1])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("n", [1, 50])
def test_one_step_gives_embedding_and_extractor_exactly(
    n: int, bias: bool, max_norm: float, dense_upload: bool
) -> None:
    method = replace(STEP, max_norm=max_norm, weight_decay=5e-3, parametrization=replace(TINY, bias=bias))
    view, truth = victim(worlds.task(), method, n)
    found = HypernetPeel()(uploaded(view) if dense_upload else view)
    assert isinstance(found, Reconstruction)
    assert found.inputs is None
    assert found.verified
    assert max(off(found, truth)) < (1e-11 if dense_upload else 1e-12)


@pairwise(n=[1, 50], bias=[True, False], init=["scaled", "published"])
def test_the_published_network_in_single_precision(n: int, bias: bool, init: str) -> None:
    generator = Hypernetwork(init=init, bias=bias)  # type: ignore[arg-type]
    method = HyperFL(steps=1, head_epochs=0, batch_size=None, lr=0.01, parametrization=generator)
    view, truth = victim(network("hyperfl-grey", num_classes=10), method, n)
    found = HypernetPeel()(view)
    assert isinstance(found, Reconstruction)
    assert max(off(found, truth)) < 1e-5
    rounded = HypernetPeel()(uploaded(view))
    assert isinstance(rounded, Reconstruction)
    assert max(off(rounded, truth)) < 1e-5


@pytest.mark.parametrize("seed", [4, pytest.param(5, marks=pytest.mark.slow)])
def test_how_long_the_activations_are_is_told_by_thousands_of_entries(seed: int) -> None:
    """Not by the embedding, of which an update in single precision tells far less: it put the length off by 1e-6."""
    method = replace(STEP, lr=0.01, parametrization=Hypernetwork(init="scaled"))
    view, truth = victim(network("hyperfl-grey", num_classes=10, seed=seed), method)
    peeled = HypernetPeel().solve(uploaded(view))
    assert isinstance(peeled, SolvedHypernet)
    own = peeled.update.hidden(dense(truth.private[EMBEDDING]).double())
    assert float(peeled.hidden @ own / (own @ own)) == pytest.approx(1, abs=1.5e-7)


@pytest.mark.parametrize("route", ["trunk", "heads"])
@pytest.mark.parametrize("bias", [True, False])
def test_each_route_stands_alone(bias: bool, route: str) -> None:
    view, truth = victim(worlds.task(), replace(STEP, parametrization=replace(TINY, bias=bias)))
    found = HypernetPeel(route=route)(view)  # type: ignore[arg-type]
    assert isinstance(found, Reconstruction)
    assert off(found, truth)[0] < 1e-11
    solved = HypernetPeel(route=route).solve(view)  # type: ignore[arg-type]
    assert not isinstance(solved, NotApplicable)
    assert solved.route == route


@pytest.mark.parametrize("dense_upload", [False, True])
@pytest.mark.parametrize("epochs", [1, 3])
def test_with_no_unit_active_the_extractor_is_the_head_biases(epochs: int, dense_upload: bool) -> None:
    method = HyperFL(epochs=epochs, batch_size=2, parametrization=TINY)
    view, truth = victim(worlds.task(), method, 4, dead=True)
    found = HypernetPeel()(uploaded(view) if dense_upload else view)
    assert isinstance(found, Reconstruction)
    assert found.verified
    assert EMBEDDING not in found.private
    for name, weight in truth.extractor.items():
        assert torch.equal(dense(found.private[f"extractor/{name}"]), weight)


@one_at_a_time(
    dense_upload=[False, True], step=[("scaled", 1e-5), ("scaled", 3e-6), ("published", 1e-6), ("published", 1e-7)]
)
def test_a_live_layer_that_hardly_moves_is_not_certified_dead(dense_upload: bool, step: tuple[str, float]) -> None:
    init, lr = step
    generator = Hypernetwork(init=init)  # type: ignore[arg-type]
    method = HyperFL(steps=1, head_epochs=0, batch_size=None, lr=lr, weight_decay=0.0, parametrization=generator)
    view, truth = victim(network("hyperfl-grey", num_classes=10), method)
    found = HypernetPeel()(uploaded(view) if dense_upload else view)
    if not isinstance(found, Reconstruction):
        assert dense_upload  # rounding has drowned it
        return
    private = {EMBEDDING: truth.private[EMBEDDING], **found.private}
    error, _ = off(replace(found, private=private), truth)
    assert not found.verified or error < MAX_RESIDUAL
    assert dense_upload or error < 0.2


def test_an_exactly_dead_layer_is_certified_however_small_the_step() -> None:
    generator = Hypernetwork(init="scaled")
    method = HyperFL(steps=1, head_epochs=0, batch_size=None, lr=1e-4, weight_decay=0.0, parametrization=generator)
    view, _ = victim(network("hyperfl-grey", num_classes=10), method, dead=True)
    solved = [HypernetPeel().solve(v) for v in (view, uploaded(view))]
    assert [(s.route, s.verified) for s in solved if not isinstance(s, NotApplicable)] == [
        ("biases", True),
        ("biases", False),  # the same numbers rounded could hide activations
    ]


def test_pruned_entries_are_missing_and_not_zero() -> None:
    method = HyperFL(steps=1, head_epochs=0, batch_size=None, lr=0.01, parametrization=NARROW)
    task = network("hyperfl-grey", num_classes=10)
    view, truth = victim(task, method, defense=Prune(ratio=0.5))
    for route in ("auto", "trunk", "heads"):
        found = HypernetPeel(route=route)(view)
        assert isinstance(found, Reconstruction)
        assert found.verified
        assert max(off(found, truth)) < 1e-4
    unaware, _ = victim(task, method, defense=Prune(ratio=0.5), knows_defense=False)
    found = HypernetPeel(route="trunk")(unaware)
    assert isinstance(found, Reconstruction)
    assert off(found, truth)[1] > 1e-4


def test_what_pruning_has_cut_altogether_is_not_certified() -> None:
    method = HyperFL(steps=1, head_epochs=0, batch_size=None, lr=0.01, parametrization=NARROW)
    task = network("hyperfl-grey", num_classes=10)
    view, truth = victim(task, method, defense=Prune(ratio=0.9))
    found = HypernetPeel()(view)
    assert isinstance(found, Reconstruction)
    assert off(found, truth)[0] < 1e-2 < off(found, truth)[1]
    assert not found.verified
    dead, _ = victim(task, replace(method, weight_decay=0.0), defense=Prune(ratio=0.9), dead=True)
    solved = HypernetPeel().solve(dead)
    assert not isinstance(solved, NotApplicable)
    assert (solved.route, solved.verified) == ("biases", False)


@pytest.mark.parametrize(
    ("defense", "least", "most"),
    [(Noise(std=0.1), 0.09, 0.02), (Noise(std=0.3), 0.27, 0.08), (Prune(ratio=0.5), 0.005, 1e-3)],
    ids=["noise", "much noise", "prune"],
)
@pytest.mark.parametrize("init", ["scaled", "published"])
def test_a_gradient_sent_once_per_unit_is_averaged(
    defense: Defense, least: float, most: float, init: Literal["scaled", "published"]
) -> None:
    method = replace(STEP, parametrization=Hypernetwork(embedding=32, hidden=64, init=init))
    plain, peeled = (HypernetPeel().solve(victim(worlds.task(), method, defense=d)[0]) for d in (Defense(), defense))
    assert isinstance(plain, SolvedHypernet)
    assert isinstance(peeled, SolvedHypernet)
    whole = torch.cat([value.flatten() for value in plain.gradient.values()])
    once = torch.cat([dense(peeled.hypernet_view.change[head_bias(name)]) for name in plain.gradient])
    averaged = torch.cat([value.flatten() for value in peeled.gradient.values()])
    assert (once - whole).norm() > least * whole.norm()  # what the biases alone say: else this shows nothing
    assert (averaged - whole).norm() < most * whole.norm()


@pytest.mark.parametrize("ratio", [0.5, 0.7, 0.9])
def test_rows_that_pruning_cut_whole_are_zero_and_no_others(ratio: float) -> None:
    peeled = HypernetPeel().solve(victim(worlds.task(), STEP, 4, defense=Prune(ratio=ratio))[0])
    assert isinstance(peeled, SolvedHypernet)
    assert all(bool(value.isfinite().all()) for value in peeled.gradient.values())


def test_over_several_steps_the_biases_alone_are_believed() -> None:
    view, _ = victim(worlds.task(), replace(STEP, steps=3, lr=0.1), 4)
    peeled = HypernetPeel().solve(view)
    assert isinstance(peeled, SolvedHypernet)
    for name, value in peeled.gradient.items():
        assert torch.equal(value.flatten(), dense(peeled.hypernet_view.change[head_bias(name)]))


def test_over_a_round_it_is_close_and_the_first_layer_closer() -> None:
    method = HyperFL(epochs=5, batch_size=2, parametrization=TINY)
    view, truth = victim(worlds.task(), method, 8)
    errors = {}
    for route in ("auto", "trunk", "heads"):
        found = HypernetPeel(route=route)(view)
        assert isinstance(found, Reconstruction)
        errors[route] = off(found, truth)[0]
    assert errors["auto"] == errors["trunk"] < 0.02
    assert errors["trunk"] < errors["heads"] < 0.3


def test_a_round_that_explodes_is_not_verified() -> None:
    method = HyperFL(epochs=5, batch_size=2, lr=0.3, max_norm=None, parametrization=replace(TINY, init="published"))
    view, truth = victim(worlds.task(), method, 8)
    found = HypernetPeel()(view)
    assert isinstance(found, Reconstruction)
    assert off(found, truth)[0] > 0.02
    assert not found.verified


@pytest.mark.parametrize("max_norm", [50.0, 0.1])
@pytest.mark.parametrize("n", [1, 3])
def test_the_plain_view_predicts_its_update(n: int, max_norm: float) -> None:
    view, truth = victim(worlds.task(), replace(STEP, max_norm=max_norm), n)
    plain = HypernetPeel(classifier="joint").rewrite(view)
    assert isinstance(plain, ServerView)
    assert isinstance(plain.method, FedPer)
    assert set(plain.private) == {"head.weight", "head.bias"}
    assert plain.update.keys() == truth.extractor.keys()
    predicted = predict(plain, replace(truth.candidate(), private={n: truth.private[n] for n in plain.private}))
    name = next(iter(predicted))
    factor = float((dense(plain.update[name]) / dense(predicted[name])).detach().flatten()[0])
    assert_near({n: dense(g) * factor for n, g in predicted.items()}, plain.update, 1e-9)
    assert (abs(factor - 1) < 1e-9) == (max_norm == 50.0)


def test_without_active_units_the_plain_view_replays_the_whole_round() -> None:
    method = HyperFL(epochs=2, head_epochs=0, batch_size=2, max_norm=0.2, parametrization=TINY)
    view, truth = victim(worlds.task(), method, 4, dead=True, knows_order=True)
    plain = HypernetPeel().rewrite(view)
    assert isinstance(plain, ServerView)
    assert_near(
        predict(plain, Candidate(truth.inputs, truth.labels, {n: truth.private[n] for n in plain.private})),
        plain.update,
        1e-9,
    )


def test_the_plain_view_of_a_round_is_close_and_drops_the_classifiers_own_phase() -> None:
    method = HyperFL(epochs=2, head_epochs=1, head_lr=0.0, batch_size=2, lr=2e-3, parametrization=TINY)
    view, truth = victim(worlds.task(), method, 4, knows_order=True)
    plain = HypernetPeel().rewrite(view)
    assert isinstance(plain, ServerView)
    assert plain.schedule == ((((2,),) * 4),)
    predicted = predict(plain, Candidate(truth.inputs, truth.labels, {n: truth.private[n] for n in plain.private}))
    mine, theirs = (torch.cat([dense(x[n]).flatten() for n in plain.update]) for x in (predicted, plain.update))
    assert torch.nn.functional.cosine_similarity(mine, theirs, dim=0) > 0.999


def test_a_shared_classifier_stays_shared() -> None:
    view, truth = victim(worlds.task(), FedAvg(lr=0.1, steps=1, weight_decay=1e-3, parametrization=TINY), 2)
    plain = HypernetPeel().rewrite(view)
    assert isinstance(plain, ServerView)
    assert not plain.private
    assert_near(predict(plain, replace(truth.candidate(), private={})), plain.update, 1e-9)


def test_chained_it_hands_the_recovered_tensors_on() -> None:
    view, truth = victim(worlds.task(), STEP)
    found = build({"name": "peel+ig", "iterations": 3})(view)
    assert isinstance(found, Reconstruction)
    assert found.inputs is not None
    assert max(off(found, truth)) < 1e-12
    assert "features" in found.private


def test_what_it_recovered_travels_with_the_rewritten_view(monkeypatch: pytest.MonkeyPatch) -> None:
    view, truth = victim(worlds.task(), STEP)
    rewritten = HypernetPeel(classifier="joint").rewrite(view)
    assert isinstance(rewritten, ServerView)
    monkeypatch.setattr(HypernetPeel, "solve", lambda *_: pytest.fail("solved a second time"))
    found = HypernetPeel(classifier="joint").lift_result(view, rewritten, Reconstruction(inputs=None))
    assert max(off(found, truth)) < 1e-12


def test_heads_without_a_solution_do_not_win_over_the_first_layer() -> None:
    view, truth = victim(worlds.task(), replace(STEP, weight_decay=0.0, parametrization=replace(TINY, bias=False)))
    turned = [TRUNK_WEIGHT, TRUNK_BIAS]  # db0 against what the heads pull back: no length fits, v stays as it is
    view = replace(view, update={n: -dense(u) if n in turned else u for n, u in view.update.items()})
    answer = HypernetPeel(route="heads")(view)
    assert isinstance(answer, NotApplicable)
    assert "no solution" in answer.reason
    solved = HypernetPeel().solve(view)
    assert not isinstance(solved, NotApplicable)
    assert solved.route == "trunk"
    found = HypernetPeel()(view)
    assert isinstance(found, Reconstruction)
    assert max(off(found, truth)) < 1e-11


def test_peel_says_why_it_does_not_apply() -> None:
    task = worlds.task()
    reasons = {
        "nothing to peel": victim(task, FedAvg(steps=1))[0],
        "nothing is shared": replace(victim(task, STEP)[0], update={}),
        "decay": victim(task, replace(STEP, steps=None, epochs=2), knows_schedule=False)[0],
    }
    for reason, view in reasons.items():
        answer = HypernetPeel()(view)
        assert isinstance(answer, NotApplicable)
        assert reason in answer.reason


def test_an_update_whose_squares_overflow_is_refused_as_such() -> None:
    view, _ = victim(worlds.task(), STEP)
    answer = HypernetPeel()(replace(view, update={n: 1e160 * dense(u).double() for n, u in view.update.items()}))
    assert isinstance(answer, NotApplicable)
    assert "squares overflow" in answer.reason


def test_a_gradient_of_zero_is_not_taken_for_a_dead_layer() -> None:
    view, _ = victim(worlds.task(), STEP)
    shares = decay_shares(view.method.phases(view.client.task, 0), view.schedule, view.shared)
    still = replace(view, update={n: dense(w) * shares[n] for n, w in view.shared.items()})
    answer = HypernetPeel()(still)
    assert isinstance(answer, NotApplicable)
    assert "no gradient" in answer.reason


@pytest.mark.parametrize("chain", [HypernetPeel(), build({"name": "peel+ig", "iterations": 2})])
def test_what_is_drowned_in_rounding_is_not_taken_for_an_extractor(chain: Attack) -> None:
    """Of an image that the network is certain of hardly anything flows back; outer products keep the factors of it."""
    method = HyperFL(steps=1, head_epochs=0, batch_size=None, weight_decay=5e-4)
    view, _ = victim(network("hyperfl-grey", num_classes=10), method)
    rounded = {n: 1e-5 * dense(view.shared[n]) for n in view.update}
    tiny = {
        n: replace(u, base=view.shared[n], scale=1e-5, terms=tuple(replace(t, coef=1e-16 * t.coef) for t in u.terms))
        if isinstance(u, LowRank)
        else dense(view.shared[n]) - sub(view.shared[n], rounded[n])
        for n, u in view.update.items()
    }
    found = chain(replace(view, update=tiny))
    assert isinstance(found, NotApplicable)
    assert "no gradient reached the hypernetwork" in found.reason


class Residual(torch.nn.Module):
    """Four residual blocks without normalization for pictures of 16 by 16 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 32, 3, padding=1)
        pairs = ((32, 32), (32, 64), (64, 128), (128, 256))
        self.inner = torch.nn.ModuleList(torch.nn.Conv2d(i, o, 3, o // i, 1) for i, o in pairs)
        self.outer = torch.nn.ModuleList(torch.nn.Conv2d(o, o, 3, padding=1) for _, o in pairs)
        self.shortcut = torch.nn.ModuleList(torch.nn.Conv2d(i, o, 1, o // i) for i, o in pairs)
        self.head = torch.nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).relu()
        for inner, outer, shortcut in zip(self.inner, self.outer, self.shortcut, strict=True):
            x = (outer(inner(x).relu()) + shortcut(x)).relu()
        return self.head(x.mean((2, 3)))


def test_the_picture_of_a_residual_extractor_comes_back_without_its_classifier() -> None:
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        task = Task(Residual().eval(), (3, 16, 16), 10)
    coarse = torch.rand(1, 3, 4, 4, generator=stream(0, "images"))
    image = torch.nn.functional.interpolate(coarse, size=16, mode="bicubic").clamp(0, 1)
    data = Batch(image, torch.tensor([3]))
    view, _ = Federation(Client(task, STEP), [ClientData(data, data)]).observe(0)
    found = build("peel+backsolve")(view)
    assert isinstance(found, Reconstruction)
    assert found.inputs is not None
    assert float((found.inputs - image).square().mean()) < 1e-4


@pytest.mark.parametrize("as_weights", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_pictures_of_a_normalized_residual_extractor_are_verified(count: int, as_weights: bool) -> None:
    """Heads that start at the network's own values make it; embedding and classifier stay with the client."""
    images, labels = pictures(count)
    task, data = Task(residual_network(), (3, 8, 8), 10), Batch(images, labels)
    method = replace(STEP, parametrization=replace(TINY, init="network"))
    view, _ = Federation(Client(task, method), [ClientData(data, data)]).observe(0)
    assert set(view.private) == {EMBEDDING, "head.weight", "head.bias"}
    if as_weights:  # as the difference of two models in float32
        view = replace(
            view, update={n: dense(view.shared[n]) - dense(sub(view.shared[n], u)) for n, u in view.update.items()}
        )
    assert_exact(build("peel+backsolve")(view), images)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("attack", ["peel", "peel+backsolve", "peel+cascade"])
def test_the_mean_of_clients_with_secrets_of_their_own_is_refused(attack: str, training: bool) -> None:
    images, labels = pictures(2)
    task, data = Task(residual_network().train(training), (3, 8, 8), 10), Batch(images, labels)
    clients = [ClientData(own, own) for own in (data.take(torch.tensor([i])) for i in range(2))]
    method = replace(STEP, train_mode=training)
    found = build(attack)(Federation(Client(task, method, SecAgg(group_size=2)), clients).observe(0)[0])
    assert isinstance(found, NotApplicable)
    assert found.reason == "only the mean of 2 clients: every client of the group has private tensors of its own"
