"""What signs and sizes of an update say of the rule that made it."""

from __future__ import annotations

import pytest
import torch
from support import chains
from torch import Tensor, nn
from torch.nn import functional

from attacks.base import NotApplicable, Reconstruction, build
from attacks.update.update_rule import RuleKind, guess_update_rule, is_sign_compressed, kind_of_update_rule
from benchmarks.reliability import confirmed
from benchmarks.reliability.rules import PLAIN, RULES
from defenses.signsgd import SignSGD
from eval.audit import update_sanity
from fl.capture import from_batch, from_update
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.seeds import stream
from fl.tensors import dense
from fl.view import ServerView, ThreatModel

SIGNS = "signs, or the first step of an adaptive optimizer"
SAID = {
    **dict.fromkeys(["Adam", "AdamW", "NAdam", "Adamax", "RMSprop", "Adagrad", "Rprop", "Lion, signs"], SIGNS),
    "signs, mean size by tensor": "signs with a size of each tensor's own",
    "LAMB": "signs with a size of each tensor's own",
    "LARS": "step sizes by layer",
    "normalized by tensor": "clipping or normalizing by tensor",
    "clipped by value, share of the largest": "clipping by value",
    "centralised": "centralized gradients",
    "4 bits": "numbers sent in few bits",
}
KINDS = {
    SIGNS: RuleKind.ADAPTIVE_FIRST_STEP,
    "clipping by value": RuleKind.CLIPPED_BY_VALUE,
    "centralized gradients": RuleKind.CENTRALIZED,
}


def view_of(model: nn.Module, rule: str, lr: float, x: Tensor, method: Method | None = None) -> ServerView:
    """The view of a float32 difference of weights."""
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    loss = functional.cross_entropy(model(x), torch.arange(len(x)) + 3)
    grads = dict(zip(weights, torch.autograd.grad(loss, list(model.parameters())), strict=True))
    moved = {**RULES, **PLAIN}[rule](weights, grads, lr, stream(0, rule))
    sent = {name: value - (value - moved[name]) for name, value in weights.items()}
    return from_update(
        model,
        sent,
        input_shape=tuple(x.shape[1:]),
        num_classes=10,
        batch_size=len(x),
        method=method,  # type: ignore
    )


def cnn() -> nn.Sequential:
    layers = [nn.Conv2d(1, 8, 3), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(288, 24), nn.ReLU(), nn.Linear(24, 10)]
    return chains.initialized(nn.Sequential(*layers)).float()


def strokes(count: int = 1) -> Tensor:
    """White strokes on black, as digits are: many pixels of one value."""
    rough = torch.rand(count, 1, 4, 4, generator=stream(0, "strokes", count))
    return (functional.interpolate(rough, (8, 8), mode="bilinear") > 0.5).float()


@pytest.mark.parametrize("rule", list(SAID))
@pytest.mark.parametrize("lr", [0.1, 1e-2])
def test_other_rules_are_named(rule: str, lr: float) -> None:
    x = torch.rand(1, 1, 8, 8, generator=stream(0, "image"))
    for net in (chains.initialized(confirmed.mlp(64, 40, 24, 10)).float(), cnn()):
        view = view_of(net, rule, lr, x)
        assert guess_update_rule(view).startswith(SAID[rule])
        assert kind_of_update_rule(view) == KINDS.get(SAID[rule], RuleKind.OTHER)
        assert SAID[rule] in update_sanity.find_inconsistency(view)


@pytest.mark.parametrize("rule", list(PLAIN))
@pytest.mark.parametrize("lr", [1.0, 0.1, 0.01, 1e-3, 1e-5])
@pytest.mark.parametrize("count", [1, 4])
def test_plain_sgd_is_not(rule: str, lr: float, count: int) -> None:
    for net in (chains.initialized(confirmed.mlp(64, 40, 24, 10)).float(), cnn()):
        view = view_of(net, rule, lr, strokes(count))
        assert guess_update_rule(view) == ""
        assert not is_sign_compressed(view)
        zeroed = net[-1]
        assert isinstance(zeroed, nn.Linear)
        with torch.no_grad():  # a classifier that starts at zero sends equal sizes for all classes but those there
            zeroed.weight.zero_()
            zeroed.bias.zero_()
        assert guess_update_rule(view_of(net, rule, lr, strokes(count))) == ""


@pytest.mark.parametrize("lr", [1.0, 0.01])
def test_signs_of_biases_alone_are_named(lr: float) -> None:
    """As Muon does beside its matrices."""
    net = chains.initialized(confirmed.mlp(64, 40, 24, 10, activation=nn.Tanh)).float()
    view = view_of(net, "SGD", lr, strokes())
    sent = {n: (g.sign() * 0.01 if g.ndim == 1 else g) for n, g in view.update.items()}  # type: ignore[union-attr]
    odd = from_update(net, sent, input_shape=(1, 8, 8), num_classes=10)
    assert guess_update_rule(odd).startswith("signs in part")


@pytest.mark.parametrize("kind", ["update", "gradient"])
def test_two_tensors_of_one_length_are_no_chance(kind: str) -> None:
    net = chains.initialized(nn.Sequential(nn.Flatten(), nn.Linear(64, 10))).float()
    view = view_of(net, "SGD", 0.1, torch.rand(1, 1, 8, 8, generator=stream(0, "image")))
    moved = {n: 0.1 * g / g.norm() for n, g in view.update.items()}  # type: ignore[union-attr]
    weights = {n: value.detach() for n, value in net.named_parameters()}
    sent = {n: weights[n] - (weights[n] - v) if kind == "update" else v for n, v in moved.items()}
    odd = from_update(net, sent, input_shape=(1, 8, 8), num_classes=10, kind=kind)
    assert "clipping or normalizing by tensor: 2 of 2" in guess_update_rule(odd)
    longer = {n: v * (1.001 if n.endswith("bias") else 1) for n, v in sent.items()}
    assert guess_update_rule(from_update(net, longer, input_shape=(1, 8, 8), num_classes=10, kind=kind)) == ""


def test_what_is_stated_is_not_named() -> None:
    x = strokes()
    method = FedAvg(optimizer="adam", lr=1e-3, steps=1, batch_size=None)
    assert guess_update_rule(view_of(cnn(), "Adam", 1e-3, x))
    assert not guess_update_rule(view_of(cnn(), "Adam", 1e-3, x, method))
    assert SIGNS in guess_update_rule(view_of(cnn(), "Adam", 1e-3, x, FedAvg(lr=1e-3, steps=1, batch_size=None)))


def test_the_note_of_a_result_says_what_it_looks_like() -> None:
    result = build("analytic")(view_of(chains.initialized(confirmed.mlp(64, 40, 10)).float(), "LARS", 1.0, strokes()))
    assert isinstance(result, Reconstruction)
    assert not result.verified
    assert "step sizes by layer" in result.note or "another optimizer" in result.note


def test_weights_in_place_of_a_difference_are_no_step_sizes_by_layer() -> None:
    model = cnn()
    sent = {name: value.detach().clone() for name, value in model.named_parameters()}
    assert "step sizes" not in guess_update_rule(from_update(model, sent, input_shape=(1, 8, 8), num_classes=10))


# ---- signs alone -----------------------------------------------------------------------------------------------------
class Scaled(nn.Module):
    """A learned scale for a whole image."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@pytest.mark.parametrize("first", [Scaled, lambda: nn.Conv2d(1, 1, 1), lambda: nn.Conv2d(1, 1, 1, bias=False)])
def test_a_matrix_of_one_number_is_no_sign(first) -> None:
    model = nn.Sequential(first(), nn.Flatten(), nn.Linear(64, 24), nn.LeakyReLU(0.2), nn.Linear(24, 10)).double()
    view, _ = from_batch(model, strokes().double(), torch.tensor([1]))
    assert not is_sign_compressed(view)
    for attack in ("rconv", "cascade", "headless"):
        result = build(attack)(view)
        assert not isinstance(result, NotApplicable) or "signs" not in result.reason


@pytest.mark.parametrize("lr", [1e-6, 3e-7, 1e-7])
def test_an_update_of_a_unit_of_rounding_is_no_sign(lr: float) -> None:
    """Most of it is rounded to zero, and what is left is as large as the weights' grid."""
    view = view_of(cnn(), "SGD", lr, strokes())
    moved = torch.cat([value.flatten() for value in view.update.values()])  # type: ignore[union-attr]
    assert float((moved == 0).float().mean()) > 0.3
    assert not is_sign_compressed(view)
    assert guess_update_rule(view) == ""


@pytest.mark.parametrize("rule", ["Lion, signs", "signs, mean size by tensor", "Rprop"])
def test_updates_of_signs_are_recognized_and_refused(rule: str) -> None:
    view = view_of(cnn(), rule, 1e-2, strokes())
    assert is_sign_compressed(view)
    for attack in ("analytic", "cascade", "headless"):
        result = build(attack)(view)
        assert isinstance(result, NotApplicable)
        assert "signs" in result.reason


def test_a_defense_of_signs_that_is_unknown_is_seen() -> None:
    for known, said in ((True, ""), (False, SIGNS)):
        threat = ThreatModel(knows_defense=known)
        x = torch.rand(1, 1, 8, 8, generator=stream(0, "x")).double()
        view, _ = from_batch(cnn().double(), x, torch.tensor([1]), defense=SignSGD(step=0.1), threat=threat)
        assert guess_update_rule(view).startswith(said)
        assert bool(guess_update_rule(view)) is bool(said)


def test_biases_whose_outputs_are_added_are_not_taken_for_clipped() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other, self.head = nn.Linear(64, 12), nn.Linear(64, 12), nn.Linear(12, 10, bias=False)
            with torch.no_grad():
                self.one.bias.zero_()
                self.other.bias.zero_()

        def forward(self, x: Tensor) -> Tensor:
            x = 1e-2 * x.flatten(1)
            return self.head(self.one(x) + self.other(x.flip(1)))

    view = view_of(Sum(), "SGD", 0.1, strokes())
    one, other = (view.update[f"{name}.bias"] for name in ("one", "other"))
    lengths = [float(dense(value).norm()) for value in view.update.values()]
    assert torch.allclose(dense(one), dense(other), rtol=1e-4)
    assert float(dense(one).norm()) == pytest.approx(max(lengths), rel=1e-4)
    assert guess_update_rule(view) == ""


class MixingTokens(nn.Module):
    """Mixes tokens of which the mean is taken, so that one signal flows back into all rows of what mixes them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Linear(16, 12), nn.Linear(16, 16), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x.flatten(1).view(-1, 16, 16))
        tokens = tokens + self.mix(functional.gelu(tokens).mT).mT
        logits: Tensor = self.head(tokens.mean(1))
        return logits


def test_rows_that_are_the_same_are_not_taken_for_clipped() -> None:
    model = chains.initialized(MixingTokens()).float()
    with torch.no_grad():
        model.mix.weight.mul_(3)
    view, _ = from_batch(model, torch.rand(1, 1, 16, 16, generator=stream(0, "tokens")), torch.tensor([3]))
    moved = dense(view.update["mix.weight"])
    torch.testing.assert_close(moved, moved[:1].expand_as(moved), atol=1e-6, rtol=0)
    assert kind_of_update_rule(view) is None


def test_rows_that_were_clipped_in_every_entry_are_not_taken_for_the_same() -> None:
    model = chains.initialized(nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Sigmoid(), nn.Linear(4, 4))).float()
    x = torch.rand(1, 1, 8, 8, generator=stream(0, "clipped"))
    loss = functional.cross_entropy(model(x), torch.tensor([1]))
    grads = dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True))
    bound = float(grads["3.weight"].abs().amin(1).sort().values[1])
    sent = {name: value.clamp(-bound, bound) for name, value in grads.items()}
    assert int((sent["3.weight"].abs() == bound).all(1).sum()) == 3
    view = from_update(model, sent, input_shape=(1, 8, 8), num_classes=4)
    assert kind_of_update_rule(view) is RuleKind.CLIPPED_BY_VALUE
