"""The tailored attack as published, and the closed form it overlooks."""

import math
from dataclasses import replace

import pytest
import torch
from support import worlds

from attacks import NotApplicable, Reconstruction
from attacks.gradient_matching.engine.batching import ProblemBatch, stack_variables
from attacks.gradient_matching.engine.problem import INPUTS, private_key
from attacks.hypernetworks.bilevel import Bilevel, EmbeddingProblem, ImageProblem
from attacks.hypernetworks.hypernet_view import parse_hypernet_view
from attacks.hypernetworks.peel import HypernetPeel
from attacks.search_control import SearchMonitor
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.methods.fedavg import FedAvg
from fl.methods.fedbabu import FedBABU
from fl.methods.fedprox import FedProx
from fl.methods.hyperfl import HyperFL
from fl.models.hypernetworks.hyperfl_hypernetwork import EMBEDDING, Hypernetwork
from fl.seeds import stream
from fl.tensors import dense, sub
from fl.types import Truth
from fl.view import ServerView, ThreatModel

TINY = Hypernetwork(embedding=4, hidden=8, init="scaled")
STEP = HyperFL(steps=1, head_epochs=0, batch_size=None, parametrization=TINY)
SHARED = FedProx(steps=1, epochs=None, batch_size=None, lr=0.1, parametrization=TINY)
"""Its classifier is shared: not generated, and in the update beside the hypernetwork's."""


def victim(method: HyperFL | FedAvg, n: int = 1, *, labels: bool = False) -> tuple[ServerView, Truth]:
    data = worlds.images(n, "victim")
    run = Federation(Client(worlds.task(), method), [ClientData(data, data)])
    return run.observe(0, threat=ThreatModel(knows_labels=labels))


def lower(view: ServerView, inner: str = "squared") -> EmbeddingProblem:
    opened = parse_hypernet_view(view)
    assert not isinstance(opened, NotApplicable)
    return EmbeddingProblem.of(opened, inner)


@pytest.mark.parametrize("dense_upload", [False, True])
@pytest.mark.parametrize("method", [STEP, SHARED])
def test_the_lower_level_has_its_minimum_in_closed_form(method: HyperFL | FedAvg, *, dense_upload: bool) -> None:
    view, truth = victim(method)
    if dense_upload:
        whole = {n: dense(view.shared[n]) - sub(view.shared[n], u) for n, u in view.update.items()}
        view = replace(view, update=whole)
    peeled = HypernetPeel().solve(view)
    assert not isinstance(peeled, NotApplicable)
    assert peeled.embedding is not None
    level = lower(view)
    # a dense upload is factorized anew, at another scale of the two factors: distances then round at 1e-16, and beside
    # a classifier that is shared at 1e-17
    floor = 1e-15 if dense_upload else 1e-18 if method is STEP else 1e-16
    outputs = {n: w - peeled.gradient[n] / method.lr for n, w in level.generate(peeled.embedding).items()}
    assert level.objective(peeled.embedding, outputs).abs() < floor
    assert level.objective(dense(truth.private[EMBEDDING]), outputs).abs() < floor
    assert level.objective(peeled.embedding + 1, outputs) > 1e-3


@pytest.mark.parametrize("inner", ["squared", "logcosh"])
def test_the_lower_level_is_the_gradient_of_its_inner_loss(inner: str) -> None:
    view, _ = victim(STEP)
    level = lower(view, inner)
    v = torch.randn(4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    outputs = {n: torch.zeros_like(w) for n, w in level.generate(v).items()}

    def loss(shared: dict[str, torch.Tensor]) -> torch.Tensor:
        made = TINY.generate({**shared, EMBEDDING: v}, view.client.task)
        apart = [(w - outputs[n]).flatten() for n, w in made.items()]
        r = torch.cat(apart)
        return 0.5 * r.square().sum() if inner == "squared" else torch.log(torch.cosh(r)).sum()

    naive = torch.func.grad(loss)({n: dense(w) for n, w in view.shared.items()})
    observed = {n: dense(w) for n, w in level.observed.items()}
    apart = sum(float((naive[n] - observed[n]).square().sum()) for n in observed)
    whole = sum(float(observed[n].square().sum()) for n in observed)
    assert float(level.objective(v, outputs)) == pytest.approx(apart / whole, rel=1e-9)


def test_a_long_search_finds_the_embedding_on_a_small_network_and_a_short_one_does_not() -> None:
    view, truth = victim(STEP)
    target = dense(truth.private[EMBEDDING])
    errors = []
    for iterations in (20, 1500):
        found = Bilevel(lower_iterations=iterations, iterations=1)(view)
        assert isinstance(found, Reconstruction)
        errors.append(float((dense(found.private[EMBEDDING]) - target).norm() / target.norm()))
    assert errors[1] < 0.2 < 0.9 < errors[0]


def test_it_returns_images_in_their_box_and_falling_objectives() -> None:
    view, _ = victim(replace(STEP, epochs=None), 3, labels=True)
    found = Bilevel(lower_iterations=60, iterations=5)(view, seed=2)
    assert isinstance(found, Reconstruction)
    assert found.inputs is not None
    assert found.inputs.shape == (3, 1, 8, 8)
    assert found.inputs.dtype == torch.float64
    assert 0 <= float(found.inputs.min()) <= float(found.inputs.max()) <= 1
    assert found.knowledge == ("labels",)
    assert found.objective == found.history[-1] < found.history[0] == 1.0
    again = Bilevel(lower_iterations=60, iterations=5)(view, seed=2)
    assert isinstance(again, Reconstruction)
    assert again.inputs is not None
    assert torch.equal(found.inputs, again.inputs)


def test_unknown_labels_are_not_reported() -> None:
    found = Bilevel.example()(victim(STEP)[0])
    assert isinstance(found, Reconstruction)
    assert found.labels is None
    assert found.knowledge == ()


def test_of_several_restarts_the_smallest_objective_wins() -> None:
    view, _ = victim(STEP)
    attack = Bilevel(lower_iterations=30, iterations=2, restarts=4)
    level = lower(view)
    draws = [stream(0, "bilevel", "lower", r) for r in range(4)]
    tries = [
        attack._search_embeddings(
            [level], stack_variables([level.initial_variables(draw, normal=False)]), SearchMonitor()
        )[0]
        for draw in draws
    ]
    best, *_ = min(tries, key=lambda found: found[1] * found[3])
    found = attack(view)
    assert isinstance(found, Reconstruction)
    assert torch.allclose(dense(found.private[EMBEDDING]), best[private_key(EMBEDDING)], rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", [STEP, replace(STEP, weight_decay=0.1), replace(STEP, steps=2, batch_size=2)])
def test_views_in_a_stack_come_out_as_alone(method: HyperFL) -> None:
    data = worlds.images(2, "victim"), worlds.images(2, "other"), worlds.images(1, "third")
    views = []
    for i, own in enumerate(data):
        run = Federation(Client(worlds.task(), method), [ClientData(own, own)], seed=i)
        views.append(run.observe(0)[0])
    plain = victim(FedAvg(steps=1))[0]
    attack = Bilevel(lower_iterations=20, iterations=12, restarts=2)
    together = attack.run([views[0], plain, *views[1:]], [3, 4, 5, 6])
    assert isinstance(together[1], NotApplicable)
    for found, view, seed in zip([together[0], *together[2:]], views, [3, 5, 6], strict=True):
        alone = attack(view, seed=seed)
        assert isinstance(found, Reconstruction)
        assert isinstance(alone, Reconstruction)
        assert found.inputs is not None
        assert alone.inputs is not None
        assert found.objective == pytest.approx(alone.objective, rel=1e-9)
        assert torch.allclose(dense(found.private[EMBEDDING]), dense(alone.private[EMBEDDING]), rtol=0, atol=1e-9)
        assert float((found.inputs - alone.inputs).abs().max()) < 1e-6


def test_small_stacks_change_nothing() -> None:
    views = [victim(STEP)[0]] * 3
    whole = Bilevel(lower_iterations=20, iterations=10).run(views, [0, 1, 2])
    parted = Bilevel(lower_iterations=20, iterations=10, max_parallel_trials=2).run(views, [0, 1, 2])
    for one, other in zip(whole, parted, strict=True):
        assert isinstance(one, Reconstruction)
        assert isinstance(other, Reconstruction)
        assert one.inputs is not None
        assert other.inputs is not None
        assert float((one.inputs - other.inputs).abs().max()) < 1e-6


def upper(view: ServerView) -> ImageProblem:
    peeled = HypernetPeel().solve(view)
    assert not isinstance(peeled, NotApplicable)
    return ImageProblem(view, peeled.extractor, torch.tensor([1]), tv_weight=0.0)


def test_the_upper_level_moves_images_and_classifier_apart() -> None:
    view, _ = victim(STEP)
    level = upper(view)
    guess = stack_variables([level.initial_variables(stream(0))])
    heads = {name for name in guess if name != INPUTS}
    assert heads == {
        private_key(name) for name in view.client.task.parameters if name.startswith(view.client.task.head)
    }
    for moves, still in (("images", heads), ("classifier", {INPUTS})):
        value, grads = ProblemBatch([replace(level, optimized=moves)]).evaluate(guess)
        assert {name for name, g in grads.items() if not g.any()} == still
        for name in guess.keys() - still:
            along = torch.randn(guess[name].shape, generator=stream(1), dtype=torch.float64)
            ends = [ProblemBatch([level]).evaluate(guess | {name: guess[name] + s * along})[0] for s in (1e-6, -1e-6)]
            slope = float((ends[0] - ends[1]) / 2e-6)
            assert float((grads[name] * along).sum()) == pytest.approx(slope, rel=1e-4)
        assert float(value) > 0


def test_a_shared_classifier_is_begun_with_and_a_frozen_one_stands_still() -> None:
    view, _ = victim(SHARED)
    guess, head = upper(view).initial_variables(stream(0)), view.client.task.head
    sent = {n: dense(v) for n, v in view.shared.items() if n.startswith(head)}
    assert sent
    assert all(torch.equal(guess[private_key(n)], v) for n, v in sent.items())
    assert isinstance(Bilevel.example()(view), Reconstruction)
    still, _ = victim(FedBABU(steps=1, epochs=None, batch_size=None, parametrization=TINY))
    assert upper(still).initial_variables(stream(0)).keys() == {INPUTS}
    assert isinstance(Bilevel.example()(still), Reconstruction)


def test_the_search_for_images_lowers_what_the_classifier_loses() -> None:
    view, _ = victim(STEP)
    level = upper(view)
    start = stack_variables([level.initial_variables(stream(0))])
    ((row, value, history, *_),) = Bilevel(iterations=150, head_lr=0.1)._search_images([level], start, SearchMonitor())
    assert value < 0.1 < history[0] == 1.0
    assert float(ProblemBatch([level]).evaluate(stack_variables([row]))[0]) < 0.1


def test_numbers_that_are_not_finite_are_a_reason() -> None:
    view, _ = victim(STEP)
    name = "hypernet.trunk.bias"
    broken = replace(view, update={**view.update, name: dense(view.update[name]) * float("nan")})
    answer = Bilevel.example()(broken)
    assert isinstance(answer, NotApplicable)
    assert "not finite" in answer.reason


def test_bilevel_says_why_it_does_not_apply() -> None:
    answer = Bilevel.example()(victim(FedAvg(steps=1))[0])
    assert isinstance(answer, NotApplicable)
    assert "nothing to peel" in answer.reason
    unknown = Bilevel.example()(replace(victim(STEP)[0], batch_size=None))
    assert isinstance(unknown, NotApplicable)


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match=r"iterations: expected a (whole )?number >= 1, got 0"):
        Bilevel(iterations=0)
    with pytest.raises(ValueError, match=r"memory_limit_gib: expected a (whole )?number > 0"):
        Bilevel(memory_limit_gib=0.0)
    with pytest.raises(ValueError, match=r"memory_limit_gib: expected a (whole )?number > 0"):
        Bilevel(memory_limit_gib=math.nan)
    with pytest.raises(ValueError, match=r"tv_weight: expected a (whole )?number >= 0"):
        Bilevel(tv_weight=-1.0)


def test_a_search_that_ends_early_leaves_the_others_alone() -> None:
    level = lower(victim(STEP)[0])
    starts = [level.initial_variables(stream(0, r), normal=False) for r in range(2)]
    far = {name: value * 1e200 for name, value in starts[1].items()}
    attack = Bilevel(lower_iterations=20, iterations=1)
    whole = attack._search_embeddings([level, level], stack_variables([starts[0], far]), SearchMonitor())
    (alone,) = attack._search_embeddings([level], stack_variables([starts[0]]), SearchMonitor())
    assert whole[0][1] == pytest.approx(alone[1], rel=1e-9)


def test_an_update_that_is_zero_is_a_reason() -> None:
    view, _ = victim(replace(STEP, weight_decay=0.0))
    nothing = {name: torch.zeros_like(dense(value)) for name, value in view.update.items()}
    answer = Bilevel.example()(replace(view, update=nothing))
    assert isinstance(answer, NotApplicable)
    assert "the update is zero" in answer.reason
