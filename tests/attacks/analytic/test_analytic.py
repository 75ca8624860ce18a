"""The input of a linear layer: exact for one image, and only what can be checked for several."""

from dataclasses import replace

import pytest
import torch
from support import worlds

from attacks import NotApplicable, Reconstruction
from attacks.analytic.analytic import Analytic
from attacks.analytic.spear import Spear
from attacks.update.first_linear_layer import LinearLayer, first_linear
from defenses.clip import Clip
from defenses.noise import Noise
from defenses.prune import Prune
from fl.client import Client
from fl.defense import Defense
from fl.federation import ClientData, Federation
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.methods.fedper import FedPer
from fl.methods.fedsr import FedSR
from fl.models import build
from fl.tensors import dense
from fl.types import Batch, Group, Phase, Task, Truth
from fl.view import ServerView

STEP = FedAvg(lr=0.1, steps=1, batch_size=None)
MOVING = FedAvg(lr=0.1, epochs=3, momentum=0.9, weight_decay=1e-2, max_norm=0.5)


def mlp(dtype: torch.dtype = torch.float64, **settings: object) -> Task:
    given = {"input_shape": (1, 8, 8), "widths": (48,), "normalize": True, **settings}
    return build("mlp", num_classes=worlds.CLASSES, **given).to(dtype=dtype)  # type: ignore[arg-type]


def victim(
    n: int = 1, method: Method = STEP, task: Task | None = None, defense: Defense | None = None, key: str = "linear"
) -> tuple[ServerView, Truth]:
    task, data = task or mlp(), worlds.images(n, key)
    data = Batch(data.inputs.to(next(iter(task.parameters.values())).dtype), data.labels)
    return Federation(Client(task, method, defense or Defense()), [ClientData(data, data)]).observe(0)


def found(view: ServerView) -> Reconstruction:
    result = Analytic()(view)
    assert isinstance(result, Reconstruction), result
    assert result.inputs is not None or result.private
    return result


@pytest.mark.parametrize("method", [STEP, MOVING], ids=["one step", "a round"])
@pytest.mark.parametrize("slope", [0.0, 0.01])
def test_one_image_is_read_off(method: Method, slope: float) -> None:
    view, truth = victim(method=method, task=mlp(slope=slope))
    result = found(view)
    assert result.inputs is not None
    assert (result.inputs - truth.inputs).abs().max() < 1e-9
    assert result.verified
    assert torch.equal(result.labels, truth.labels)


def test_single_precision_is_enough() -> None:
    view, truth = victim(task=mlp(torch.float32))
    result = found(view)
    assert result.inputs is not None
    assert result.inputs.dtype == torch.float32
    assert (result.inputs - truth.inputs).abs().max() < 1e-4


def test_softmax_regression_and_a_private_head_give_the_image_too() -> None:
    for view, truth in (
        victim(task=build("linear", num_classes=3).to(dtype=torch.float64)),
        victim(method=FedPer(lr=0.1, steps=1)),
    ):
        result = found(view)
        assert result.inputs is not None
        assert (result.inputs - truth.inputs).abs().max() < 1e-9


def test_a_deeper_layer_gives_its_features() -> None:
    view, _ = victim(task=worlds.task())
    result = found(view)
    assert result.inputs is None
    assert result.private["features"].shape == (64,)
    assert isinstance(Analytic()(victim(method=MOVING, task=worlds.task())[0]), NotApplicable)


def test_a_number_without_dimensions_among_the_parameters_is_no_obstacle() -> None:
    """FedSR keeps one to itself; `spear` leaves one image to this attack."""
    run = worlds.federation(worlds.one_step(FedSR.example()), rounds=0)
    view, truth = run.observe(0, data=worlds.images(1, "victim"))
    assert torch.Size() in view.private.values()
    result = found(view)
    assert result.verified
    body = view.task.model.get_submodule("body")
    weights = {n.removeprefix("body."): dense(v) for n, v in view.shared.items() if n.startswith("body.")}
    given: list[torch.Tensor] = []
    body.get_submodule("fc1").register_forward_hook(lambda _module, args, _output: given.append(args[0]))
    torch.func.functional_call(body, weights, (truth.inputs,))
    assert torch.allclose(dense(result.private["features"]), given[0][0], atol=1e-9)
    assert torch.equal(dense(Spear()(view).private["features"]), dense(result.private["features"]))  # type: ignore[union-attr]


def test_of_a_pruned_update_what_was_sent_is_fitted() -> None:
    view, truth = victim(defense=Prune(ratio=0.8))
    result = found(view)
    unaware = found(replace(view, threat=replace(view.threat, knows_defense=False)))
    layer = first_linear(view)
    assert isinstance(layer, LinearLayer)
    assert layer.transmitted is not None
    heard = layer.transmitted[layer.bias_update != 0].any(0).view(8, 8)
    errors = [(r.inputs - truth.inputs).abs()[0, 0, heard].max() for r in (result, unaware)]  # type: ignore[operator]
    assert errors[0] < 1e-9 < 1e-3 < errors[1]
    assert result.verified is bool(heard.all())
    assert not unaware.verified


def test_noise_is_averaged_over_all_neurons_and_not_taken_for_success() -> None:
    view, truth = victim(task=mlp(widths=(400,)), defense=Noise(std=0.1))
    result = found(view)
    layer = first_linear(view)
    assert isinstance(layer, LinearLayer)
    naive = layer.pixels((layer.bias_update @ layer.update / layer.bias_update.square().sum())[None])
    errors = [float((x - truth.inputs).square().mean().sqrt()) for x in (result.inputs, naive)]  # type: ignore[operator]
    assert errors[0] < 0.01
    assert errors[0] <= errors[1]
    assert not result.verified


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_unknown_defense_that_shortens_tensors_apart_is_not_verified(dtype: torch.dtype) -> None:
    """The update stays of rank one, and only how bright the image seems is wrong."""
    for defense, right in ((Clip(max_norm=1e-2, scope="tensor"), False), (Clip(max_norm=1e-2), True)):
        view, truth = victim(task=mlp(dtype), defense=defense)
        result = found(replace(view, threat=replace(view.threat, knows_defense=False)))
        assert result.objective < 1e-5
        assert result.verified is right
        assert bool((result.inputs - truth.inputs).abs().max() < 1e-4) is right  # type: ignore[operator]


def test_an_unknown_defense_is_not_looked_at() -> None:
    """This one leaves every bit as it is, so nothing may depend on it."""
    results = []
    for defense in (Defense(), Clip(max_norm=1e6)):
        view, _ = victim(6, task=mlp(widths=(64,)), defense=defense)
        results.append(found(replace(view, threat=replace(view.threat, knows_defense=False))))
    assert torch.equal(results[0].inputs, results[1].inputs)  # type: ignore[arg-type]


class Apart(FedAvg):
    """The first layer's bias moves at another rate."""

    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        (phase,) = super().phases(task, round)
        return (replace(phase, groups=(Group(prefixes=("body.fc1.bias",), lr=0.05), *phase.groups)),)


def test_a_weight_and_a_bias_that_are_trained_apart_have_no_ratio() -> None:
    view, truth = victim(method=Apart(lr=0.1, steps=1, batch_size=None))
    assert "body.fc1.bias" in view.update
    layer = first_linear(view)
    assert isinstance(layer, NotApplicable)
    assert "trained apart" in layer.reason
    result = found(view)  # by what the layers above make of it, without the bias
    assert result.inputs is not None
    assert (result.inputs - truth.inputs).abs().max() < 1e-9
    assert result.verified


def test_of_a_batch_images_that_a_neuron_sees_alone_come_out_with_their_labels() -> None:
    view, truth = victim(6, task=mlp(widths=(64,)))
    result = found(view)
    assert result.inputs is not None
    assert result.labels is not None
    assert result.verified
    assert 1 <= len(result.inputs) <= 6
    distances = (result.inputs[:, None] - truth.inputs[None]).flatten(2).abs().amax(2)
    assert distances.amin(1).max() < 1e-6
    nearest = distances.argmin(1)
    assert len(set(nearest.tolist())) == len(nearest)
    assert torch.equal(result.labels, truth.labels[nearest])


@pytest.mark.parametrize("seed", range(4))
def test_a_mixture_of_images_is_not_handed_out(seed: int) -> None:
    """LeakyReLU silences no one: every neuron sees all images, and ratios of gradients are pictures of several."""
    view, _ = victim(3, task=mlp(slope=0.5), key=f"mixed {seed}")
    assert isinstance(Analytic()(view), NotApplicable)


@pytest.mark.parametrize(
    ("n", "method", "task", "reason"),
    [
        (2, FedAvg(lr=0.1, steps=2), None, "one local step"),
        (2, STEP, worlds.task(), "not given the image"),
        (2, FedPer(lr=0.1, steps=1), None, "private"),
        (2, FedAvg(lr=0.1, steps=1, max_norm=1.0), None, "size of the gradient"),
    ],
)
def test_what_cannot_be_checked_is_refused(n: int, method: Method, task: Task | None, reason: str) -> None:
    result = Analytic()(victim(n, method, task)[0])
    assert isinstance(result, NotApplicable)
    assert reason in result.reason
