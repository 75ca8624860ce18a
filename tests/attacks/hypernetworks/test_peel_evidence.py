"""A small residual of one layer's equations is no proof where these are few, or of one direction."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support import worlds

from attacks import NotApplicable, Reconstruction
from attacks.hypernetworks.peel import HypernetPeel, SolvedHypernet
from defenses.noise import Noise
from defenses.prune import Prune
from fl.client import Client
from fl.defense import Defense
from fl.federation import ClientData, Federation
from fl.methods.fedper import FedPer
from fl.methods.hyperfl import HyperFL
from fl.models import build as network
from fl.models.hypernetworks.hyperfl_hypernetwork import EMBEDDING, Hypernetwork, head_bias, head_weight
from fl.parametrization import Generated
from fl.seeds import stream
from fl.tensors import dense, sub
from fl.types import Batch, Task, Truth
from fl.view import ServerView

STEP = HyperFL(steps=1, head_epochs=0, batch_size=None, weight_decay=0.0)


def observed(
    method: HyperFL | FedPer, *, task: Task | None = None, n: int = 1, seed: int = 0, defense: Defense | None = None
) -> tuple[ServerView, Truth]:
    """A client's update as the difference of two dense models, and the truth."""
    task = task or worlds.task()
    images = torch.rand(n, *task.input_shape, generator=stream(seed, "images"), dtype=torch.float64)
    data = Batch(images, torch.randint(0, task.num_classes, (n,), generator=stream(seed, "labels")))
    run = Federation(Client(task, method, defense or Defense()), [ClientData(data, data)], seed=seed)
    view, truth = run.observe(0)
    update = {n: dense(view.shared[n]) - dense(sub(view.shared[n], u)) for n, u in view.update.items()}
    return replace(view, update=update), truth


def off(solved: SolvedHypernet, truth: Truth) -> tuple[float, float]:
    """Relative errors of the extractor and of the embedding."""
    mine, theirs = (torch.cat([w[n].flatten() for n in truth.extractor]) for w in (solved.extractor, truth.extractor))
    assert solved.embedding is not None
    true = dense(truth.private[EMBEDDING])
    return float((mine - theirs).norm() / theirs.norm()), float((solved.embedding - true).norm() / true.norm())


def solve(view: ServerView) -> SolvedHypernet:
    solved = HypernetPeel().solve(view)
    assert isinstance(solved, SolvedHypernet)
    return solved


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("defense", [Noise(std=0.3), Prune(ratio=0.99)], ids=["noise", "prune"])
def test_the_row_of_a_single_unit_is_not_taken_for_an_embedding(defense: Defense, bias: bool) -> None:
    """One row has a v whatever it holds, so that the residual is 0: the heads have to fit, too."""
    wrong = 0
    for seed in range(12):
        made = Hypernetwork(embedding=3, hidden=1 + seed % 2, init="published", bias=bias)
        view, truth = observed(replace(STEP, parametrization=made), seed=seed, defense=defense)
        solved = HypernetPeel().solve(view)
        if isinstance(solved, SolvedHypernet) and solved.embedding is not None:
            far = max(off(solved, truth)) > 0.05
            wrong += far
            assert not (solved.verified and far)
    assert wrong  # else this shows nothing


def test_a_single_unit_is_confirmed_by_its_heads() -> None:
    made = Hypernetwork(embedding=3, hidden=1, init="network")
    for seed in range(8):
        view, truth = observed(replace(STEP, parametrization=made), seed=seed)
        solved = HypernetPeel().solve(view)
        if isinstance(solved, SolvedHypernet) and solved.embedding is not None:
            assert solved.verified
            assert max(off(solved, truth)) < 1e-9
            return
    pytest.fail("expected a unit that is active at one of eight seeds")


@pytest.mark.parametrize(
    ("lr", "steps", "momentum", "embedding"), [(3.0, 3, 0.0, 2), (1.2, 2, 0.9, 8), (0.8, 10, 0.9, 1)]
)
@pytest.mark.parametrize("bias", [True, False])
def test_steps_of_one_direction_prove_nothing(
    lr: float, steps: int, momentum: float, embedding: int, bias: bool
) -> None:
    """Their sum is one outer product, whose factor may be far from the embedding that they started from."""
    task = network("mlp", num_classes=2, seed=0, input_shape=(1, 8, 8)).to(dtype=torch.float64)
    made = Hypernetwork(embedding=embedding, hidden=50, init="published", bias=bias)
    method = FedPer(lr=lr, steps=steps, momentum=momentum, weight_decay=0.0, batch_size=1, parametrization=made)
    wrong = 0
    for seed in range(12):
        view, truth = observed(method, task=task, n=4, seed=seed)
        solved = HypernetPeel().solve(view)
        if isinstance(solved, SolvedHypernet) and solved.embedding is not None:
            far = max(off(solved, truth)) > 0.05
            wrong += far
            assert not (solved.verified and far)
    assert wrong  # else this shows nothing


def test_steps_without_an_embedding_that_moves_are_confirmed() -> None:
    made = Hypernetwork(embedding=8, hidden=16, init="scaled")
    method = HyperFL(steps=5, head_epochs=0, batch_size=1, lr=0.1, learn_embedding=False, parametrization=made)
    view, truth = observed(method, n=3)
    solved = solve(view)
    assert solved.verified
    assert max(off(solved, truth)) < 1e-3


def test_a_tensor_without_any_gradient_has_a_gradient_of_zero() -> None:
    view, _ = observed(replace(STEP, parametrization=Hypernetwork(embedding=8, hidden=50, init="scaled")))
    name = next(iter(view.client.task.parameters))
    still = {n: torch.zeros_like(dense(view.update[n])) for n in (head_weight(name), head_bias(name))}
    solved = solve(replace(view, update={**view.update, **still}))
    assert not solved.gradient[name].any()
    assert all(bool(value.isfinite().all()) for value in solved.with_layer_inputs().values())


def test_heads_at_rest_give_no_activations() -> None:
    """Their update was too small for its type, say, beside that of the first layer."""
    made = Hypernetwork(embedding=8, hidden=2, init="published", bias=False)
    view, _ = observed(replace(STEP, parametrization=made), seed=1)
    still = {n: torch.zeros_like(dense(u)) for n, u in view.update.items() if n.startswith("hypernet.heads.")}
    found = HypernetPeel()(replace(view, update={**view.update, **still}))
    assert isinstance(found, NotApplicable) or not found.verified


@dataclass(frozen=True, kw_only=True)
class Scaled(Hypernetwork):
    """What the heads make, times a tenth."""

    def from_hidden(self, params: Any, hidden: Any, task: Task) -> Any:
        return {n: 0.1 * w for n, w in super().from_hidden(params, hidden, task).items()}

    def pull_back(self, params: Any, grads: Any, task: Task, live: Any) -> Any:
        return super().pull_back(params, {n: 0.1 * g for n, g in grads.items()}, task, live)


@dataclass(frozen=True, kw_only=True)
class Leaky(Hypernetwork):
    """Another activation."""

    def generate(self, params: Any, task: Task) -> Any:
        hidden = torch.nn.functional.leaky_relu(self.preactivation(params), 0.3)
        return self.from_hidden(params, hidden, task)

    def pull_back(self, params: Any, grads: Any, task: Task, live: Any) -> Any:
        return Generated.pull_back(self, params, grads, task, live)


@dataclass(frozen=True, kw_only=True)
class Watched(Hypernetwork):
    """The same, looked at."""

    def pull_back(self, params: Any, grads: Any, task: Task, live: Any) -> Any:
        return super().pull_back(params, grads, task, live)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [Scaled, Leaky, Watched])
def test_a_hypernetwork_of_other_layers_is_not_solved_by_these(kind: type[Hypernetwork], bias: bool) -> None:
    made = kind(embedding=8, hidden=16, init="scaled", bias=bias)
    found = HypernetPeel()(observed(replace(STEP, parametrization=made))[0])
    if kind is Watched:
        assert isinstance(found, Reconstruction)
        assert found.verified
    else:
        assert isinstance(found, NotApplicable)
        assert found.reason == f"{kind.__name__} makes weights in another way than W_k relu(W_0 v + b_0) + b_k"
