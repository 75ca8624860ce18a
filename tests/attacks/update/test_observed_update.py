"""What an update is once decay, step size, defense and sign are accounted for, and that attacks ask one object."""

import ast
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from attacks import NotApplicable
from attacks.base import build
from attacks.update.observed_update import ObservedUpdate
from defenses.clip import Clip
from defenses.nvflare_percentile import NVFlarePercentile
from defenses.prune import Prune
from fl.capture import from_batch
from fl.defense import Defense
from fl.methods.fedavg import FedAvg
from fl.seeds import stream
from fl.tensors import Tensors, dense, scale_tensors
from fl.view import ServerView, ThreatModel

ROOT = Path(__file__).parents[3]
STEP = {"lr": 0.1, "steps": 1, "batch_size": None}


def model() -> nn.Module:
    """One hidden layer and a classifier, in double precision."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Sigmoid(), nn.Linear(8, 5)).double()
    draw = stream(0, "weights")
    for value in net.parameters():
        value.data = torch.randn(value.shape, generator=draw, dtype=torch.float64) / 4
    return net


def seen(images: int = 2, *, like: nn.Module | None = None, **settings: object) -> ServerView:
    """A view of one round of FedAvg."""
    pixels = torch.rand(images, 1, 4, 4, generator=stream(0, "images"), dtype=torch.float64)
    labels = torch.arange(images) % 5
    method = FedAvg(**{**STEP, **settings})  # type: ignore[arg-type]
    return from_batch(like or model(), pixels, labels, method=method, head="3.")[0]


def gradient(view: ServerView) -> dict[str, torch.Tensor]:
    """That of the mean loss at the weights sent."""
    net = model()
    pixels = torch.rand(view.batch_size, 1, 4, 4, generator=stream(0, "images"), dtype=torch.float64)
    loss = nn.functional.cross_entropy(net(pixels), torch.arange(view.batch_size) % 5)
    return dict(zip(dict(net.named_parameters()), torch.autograd.grad(loss, list(net.parameters())), strict=True))


def test_weight_decay_is_taken_off_in_one_module():
    """Every attack asks `ObservedUpdate`: a recipe of one's own would be found here."""
    users = set()
    for path in sorted((ROOT / "attacks").rglob("*.py")):
        imports = [
            n for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.Import | ast.ImportFrom)
        ]
        if any(word in ast.unparse(node) for node in imports for word in ("weight_decay", "fl.decay")):
            users.add(path.relative_to(ROOT).as_posix())
    assert users == {"attacks/update/observed_update.py"}


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_gradient_of_one_step_is_exact(decay: float):
    view = seen(weight_decay=decay)
    observed, true = ObservedUpdate(view), gradient(view)
    found = observed.gradient
    assert not isinstance(found, NotApplicable)
    assert found.keys() == true.keys()
    for name, value in true.items():
        assert torch.allclose(dense(found[name]), value, rtol=1e-9, atol=1e-12)
        assert torch.allclose(dense(observed.change[name]), 0.1 * value, rtol=1e-9, atol=1e-13)
        share = observed.decay_shares.get(name, 0.0)
        assert share == pytest.approx(0.1 * decay)
        assert observed.scale(name) == pytest.approx(0.1)


def test_what_no_gradient_can_be_read_off_says_why():
    assert "rescales" in reason(seen(optimizer="adam"))
    assert "unknown" in reason(replace(seen(), schedule=None))
    signs = seen()
    assert "signs" in reason(replace(signs, update={n: dense(v).sign() for n, v in signs.update.items()}))


def reason(view: ServerView) -> str:
    """Why there is no gradient."""
    found = ObservedUpdate(view).gradient
    assert isinstance(found, NotApplicable)
    return found.reason


def test_clipping_and_rewriting_hide_the_scale():
    assert ObservedUpdate(seen(max_norm=1.0)).scale("1.weight") is None
    assert ObservedUpdate(replace(seen(), scale_unknown=True)).scale("1.weight") is None
    assert ObservedUpdate(seen(steps=3)).steps("1.weight") == 3


def test_decay_of_an_unknown_number_of_steps_is_unknown():
    view = replace(seen(weight_decay=0.1, steps=None, epochs=2), schedule=None)
    assert set(ObservedUpdate(view).unknown_decay) == set(view.shared)
    assert not ObservedUpdate(seen(weight_decay=0.1)).unknown_decay


def test_a_known_defense_lets_only_a_part_of_the_decay_through():
    view = seen(weight_decay=0.1)
    defense = Prune(ratio=0.5)
    pruned = replace(view, defense=defense, update=defense.transform_update(view.update, None))
    observed = ObservedUpdate(pruned)
    for name, value in observed.change.items():
        there = observed.transmitted(name)
        assert 0 < int(there.sum()) < there.numel() or "bias" in name
        full = dense(ObservedUpdate(view).change[name])
        assert torch.allclose(dense(value)[there], full[there])
        assert not dense(value)[~there].any()
    unknown = ObservedUpdate(replace(pruned, threat=ThreatModel(knows_defense=False)))
    assert all(bool(unknown.transmitted(name).all()) for name in unknown.change)


def test_what_a_known_defense_has_altered_is_named():
    view = seen()
    for defense, altered, complete in (
        (NVFlarePercentile(percentile=30.0, gamma=1e6), False, False),
        (NVFlarePercentile(percentile=0.0, gamma=1e-3), True, False),
        (NVFlarePercentile(percentile=0.0, gamma=1e6), False, True),
        (Clip(max_norm=1e-3), False, True),
    ):
        sent = replace(view, defense=defense, update=defense.transform_update(view.update, None))
        observed = ObservedUpdate(sent)
        assert (observed.altered() is not None) is altered
        assert observed.is_complete(*sent.update) is complete
        unaware = ObservedUpdate(replace(sent, threat=ThreatModel(knows_defense=False)))
        assert unaware.altered() is None
        assert unaware.is_complete(*sent.update)
        if altered:
            assert "nvflare-percentile has cut or altered" in str(observed.altered("1.weight"))


@dataclass(frozen=True, kw_only=True)
class Halve(Defense):
    """Sends half of the update."""

    name = "halve"

    def surrogate(self, predicted: Tensors, observed: Tensors) -> Tensors:
        return scale_tensors(predicted, 0.5)


def test_a_signal_gets_the_length_that_it_had_before_a_known_defense():
    signal = torch.tensor([0.5, -0.1, 0.2, 0.1, 0.3], dtype=torch.float64)
    found = ObservedUpdate(replace(seen(), defense=Halve())).before_defense("3.bias", signal)
    assert torch.allclose(found, 2 * signal)
    assert torch.equal(ObservedUpdate(seen()).before_defense("3.bias", signal), signal)


@pytest.mark.parametrize("images", [1, 2])
def test_an_update_after_minus_before_is_found_out(images: int):
    view = seen(images)
    flipped = replace(view, update={n: -dense(v) for n, v in view.update.items()})
    assert ObservedUpdate(flipped).sign_flipped
    assert not ObservedUpdate(view).sign_flipped


def test_a_network_that_negates_its_logits_is_not_taken_for_a_flipped_update():
    class Negated(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return -super().forward(x)

    net = Negated(*model())
    assert not ObservedUpdate(seen(1, like=net)).sign_flipped


def test_rounding_grows_with_the_weights_that_an_update_is_a_difference_of():
    view = seen()
    even = replace(view, rounded=False)
    found, small = ObservedUpdate(view).relative_rounding, ObservedUpdate(even).relative_rounding
    eps = torch.finfo(torch.float64).eps
    for name, value in view.update.items():
        assert small[name] == pytest.approx(0.25 * eps)
        ratio = float(dense(view.shared[name]).norm() / dense(value).norm())
        assert found[name] == pytest.approx(0.25 * eps * (1 + ratio))


def test_step_of_size_zero_is_named_as_the_reason() -> None:
    view = seen(1, lr=0.0)
    for name in ("cascade", "backsolve", "rgap"):
        found = build(name)(view, seed=0)
        assert isinstance(found, NotApplicable)
        assert "step size is 0" in found.reason, name
