"""The tailored attack as published, and the closed form it overlooks."""

from dataclasses import replace

import pytest
import torch
from support import worlds

from attacks import NotApplicable, Reconstruction
from attacks.bilevel import Bilevel, _Lower
from attacks.peel import Peel, open_view
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.models.hypernetwork import EMBEDDING, Hypernetwork
from fl.seeds import stream
from fl.simulate import Truth
from fl.tensors import dense, minus
from fl.types import ServerView, ThreatModel

TINY = Hypernetwork(embedding=4, hidden=8, init="scaled")
STEP = HyperFL(steps=1, head_epochs=0, batch_size=None, parametrisation=TINY)


def victim(method: HyperFL | FedAvg, n: int = 1, *, labels: bool = False) -> tuple[ServerView, Truth]:
    data = worlds.images(n, "victim")
    run = Federation(Client(worlds.task(), method), [ClientData(data, data)])
    return run.observe(0, threat=ThreatModel(knows_labels=labels))


def lower(view: ServerView, inner: str = "squared") -> _Lower:
    opened = open_view(view)
    assert not isinstance(opened, NotApplicable)
    return _Lower.of(opened, inner)


@pytest.mark.parametrize("dense_upload", [False, True])
def test_the_lower_level_has_its_minimum_in_closed_form(dense_upload: bool) -> None:
    view, truth = victim(STEP)
    if dense_upload:
        whole = {n: dense(view.shared[n]) - minus(view.shared[n], u) for n, u in view.update.items()}
        view = replace(view, update=whole)
    peeled = Peel().solve(view)
    assert not isinstance(peeled, NotApplicable)
    assert peeled.embedding is not None
    level = lower(view)
    # a dense upload is factorised anew, at another scale of the two factors: distances then round at 1e-16
    floor = 1e-15 if dense_upload else 1e-18
    outputs = {n: w - peeled.gradient[n] / STEP.lr for n, w in level.generate(peeled.embedding).items()}
    assert level.objective(peeled.embedding, outputs) < floor
    assert level.objective(dense(truth.private[EMBEDDING]), outputs) < floor
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
    tries = [attack._embedding(lower(view), stream(0, "bilevel", "lower", r)) for r in range(4)]
    least = min(history[-1] for _, history in tries)
    (best,) = [embedding for embedding, history in tries if history[-1] == least]
    found = attack(view)
    assert isinstance(found, Reconstruction)
    assert torch.equal(dense(found.private[EMBEDDING]), best)


def test_it_says_why_not() -> None:
    answer = Bilevel.example()(victim(FedAvg(steps=1))[0])
    assert isinstance(answer, NotApplicable)
    assert "nothing to peel" in answer.reason
    unknown = Bilevel.example()(replace(victim(STEP)[0], batch_size=None))
    assert isinstance(unknown, NotApplicable)


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="expected iterations >= 1, got 0"):
        Bilevel(iterations=0)
    with pytest.raises(ValueError, match="expected tv >= 0"):
        Bilevel(tv=-1.0)
