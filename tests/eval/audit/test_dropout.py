"""Audits of captured updates whose clients trained with dropout: masks are read off one example's, or it is named."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hyperleak
from defenses import defenses
from eval.audit.findings import AuditReport
from fl.capture import from_update
from fl.methods.fedavg import FedAvg
from fl.seeds import stream
from fl.simulation.dropout_masks import Mask

SHAPE = (1, 8, 8)
LR = 0.1
STILL = FedAvg(lr=LR, steps=1, batch_size=None, train_mode=False)


class Functional(nn.Module):
    """A network that drops in its forward, or keeps a number by the name of dropout and drops nothing."""

    def __init__(self, drops: bool = True) -> None:
        super().__init__()
        self.first, self.second, self.drops = nn.Linear(64, 16), nn.Linear(16, 5), drops
        self.dropout = 0.0 if drops else 0.5

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.flatten(1)).tanh()
        return self.second(nn.functional.dropout(hidden, 0.5, self.training and self.drops))


class DropPath(nn.Module):
    """Leaves out a branch for each example by chance, as timm has it."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.new_empty((len(x), 1)).bernoulli_(0.5) / 0.5 if self.training else x


class Rows(nn.Module):
    """Gives a picture's rows to a layer that takes a series, and the last step of what that makes to a classifier."""

    def __init__(self, series: nn.Module) -> None:
        super().__init__()
        self.series, self.head = series, nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        rows = x[:, 0]
        attention = isinstance(self.series, nn.MultiheadAttention)
        made = self.series(rows, rows, rows) if attention else self.series(rows)
        return self.head((made if isinstance(made, Tensor) else made[0])[:, -1])


def encoder() -> nn.Module:
    return Rows(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True))


def dense(*after: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), *after, nn.Linear(16, 5))


def made(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        return build().train()


def examples(count: int) -> tuple[Tensor, Tensor]:
    draw = stream(0, "dropout")
    return torch.rand(count, *SHAPE, generator=draw), torch.randint(5, (count,), generator=draw)


def captured(model: nn.Module, count: int = 1) -> dict[str, Tensor]:
    """What a client sends that takes one step on so many examples, in the modes of the model."""
    inputs, labels = examples(count)
    own = copy.deepcopy(model)
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(2)
        nn.functional.cross_entropy(own(inputs), labels).backward()
    return {name: LR * value.grad for name, value in own.named_parameters() if value.grad is not None}


def audited(model: nn.Module, update: dict[str, Tensor], count: int = 1, **settings: object) -> AuditReport:
    inputs, labels = examples(count)
    asked = {"attacks": ["analytic"], "batch_size": count, "input_shape": SHAPE, **settings}
    return hyperleak.audit(model, inputs, labels, update=update, **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", [None, FedAvg(lr=LR, steps=1, batch_size=None)])
def test_masks_of_one_example_are_read_and_confirm_its_picture(method: FedAvg | None) -> None:
    model = made(lambda: dense(nn.Dropout(0.5)))
    report = audited(model if method is None else model.eval(), captured(model.train()), method=method)
    (finding,) = report.findings
    assert finding.rows[0]["verified"]
    assert finding.rows[0]["psnr"] == pytest.approx(100)
    assert not report.mismatch
    assert "masks of dropout were read off the update: 3" in report.notes


CHANNELS = {
    "linear": (nn.Dropout2d(0.5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32, 5)),
    "convolution": (nn.ReLU(), nn.Dropout2d(0.5), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(16, 5)),
}


@pytest.mark.parametrize("kind", CHANNELS)
def test_masks_of_whole_channels_are_read_behind_activations_and_pooling(kind: str) -> None:
    model = made(lambda: nn.Sequential(nn.Conv2d(1, 8, 5), *(copy.deepcopy(layer) for layer in CHANNELS[kind])))
    update = captured(model)
    view = from_update(model, update, input_shape=SHAPE)
    (mask,) = (module for module in view.task.model.modules() if isinstance(module, Mask))
    assert set(mask.values[:, 0, 0].tolist()) == {0.0, 2.0}
    inputs, labels = examples(1)
    again = copy.deepcopy(view.task.model)
    nn.functional.cross_entropy(again(inputs), labels).backward()
    for name, value in again.named_parameters():
        torch.testing.assert_close(LR * value.grad, update[name], rtol=0, atol=1e-6)


def test_channels_that_meet_before_a_layer_show_no_mask() -> None:
    model = made(
        lambda: nn.Sequential(nn.Conv2d(1, 8, 5), nn.Dropout2d(0.5), nn.Softmax(1), nn.Flatten(), nn.Linear(128, 5))
    )
    with pytest.raises(ValueError, match="are not read off this update"):
        from_update(model, captured(model), input_shape=SHAPE)


class Residual(nn.Module):
    """Blocks whose branches are left out by chance, of which the whole is passed on."""

    def __init__(self, *paths: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 16), nn.Linear(16, 5)
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), path) for path in paths)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1))
        for branch in self.branches:
            x = x + branch(x)
        return self.last(x)


def test_branches_that_were_left_out_are_read_and_confirm_the_picture() -> None:
    model = made(lambda: Residual(*(DropPath() for _ in range(6))))
    update = captured(model)
    report = audited(model, update)
    assert report.findings[0].rows[0]["verified"]
    assert not report.mismatch
    assert "branches.0.2" in report.notes[0]
    told = from_update(model, update, input_shape=SHAPE).task.model
    factors = [float(module.values) for module in told.modules() if isinstance(module, Mask)]
    moved = [bool(update[f"branches.{place}.0.weight"].any()) for place in range(6)]
    assert factors == [2.0 * one for one in moved]
    assert set(moved) == {True, False}


def test_branches_of_several_examples_are_not_read() -> None:
    model = made(lambda: Residual(DropPath()))
    with pytest.raises(ValueError, match=r"'branches.0.2' \(DropPath\).*leave out a branch as a whole, are read off a"):
        audited(model, captured(model, 2), count=2)


class Branching(nn.Module):
    """A network that adds what dropout returns to what a layer makes of its numbers above zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.drop(self.first(x.flatten(1)).tanh())
        return self.second(kept.relu()) + kept[:, :5]


def test_numbers_that_a_layer_takes_above_zero_alone_show_no_mask_where_more_takes_them() -> None:
    model = made(Branching)
    with pytest.raises(ValueError, match="are not read off this update"):
        from_update(model, captured(model), input_shape=SHAPE)


def test_a_view_has_the_masks_in_the_place_of_dropout() -> None:
    model = made(lambda: dense(nn.Dropout(0.5)))
    view = from_update(model, captured(model), input_shape=SHAPE)
    mask = view.task.model.get_submodule("3")
    assert isinstance(mask, Mask)
    assert not mask.of_pixels
    assert set(mask.values.tolist()) == {0.0, 2.0}
    assert isinstance(model[3], nn.Dropout)  # the user's own stays as it is


def test_several_examples_are_refused_by_name_and_the_way_on_works() -> None:
    model = made(lambda: dense(nn.Dropout(0.5)))
    update = captured(model, 4)
    with pytest.raises(ValueError, match=r"got dropout \('3'\).* it is of 4 examples.* call model\.eval\(\)"):
        audited(model, update, 4)
    report = audited(model.eval(), update, 4)
    assert "Dropout, mixup" in report.mismatch
    assert "(EMA) make such updates, too" in report.mismatch
    assert not report.findings[0].verified


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"method": FedAvg(lr=LR, steps=2, batch_size=None)}, "here it is of 2 steps"),
        (
            {"method": FedAvg(lr=LR, steps=1, batch_size=None, optimizer="adam", weight_decay=0.1)},
            "here adam mixes weight decay into every weight's step",
        ),
        ({"defense": defenses.build({"name": "prune", "ratio": 0.5})}, "here the defense prune may have changed"),
    ],
)
def test_what_tells_no_masks_is_named(settings: dict[str, object], why: str) -> None:
    model = made(lambda: dense(nn.Dropout(0.5)))
    with pytest.raises(ValueError, match=rf"without dropout .*{why}"):
        audited(model, captured(model), **settings)


@pytest.mark.parametrize("build", [lambda: dense(nn.AlphaDropout(0.5)), lambda: dense(nn.Dropout(0.5), nn.Sigmoid())])
def test_masks_that_no_layer_shows_are_refused(build: Callable[[], nn.Module]) -> None:
    model = made(build)
    with pytest.raises(ValueError, match=r"got dropout \('3'\), whose masks are not read off this update"):
        audited(model, captured(model))


@pytest.mark.parametrize("decay", [5e-4, 0.1])
def test_weight_decay_that_is_stated_is_taken_off_before_masks_are_read(decay: float) -> None:
    model = made(lambda: dense(nn.Dropout(0.5)))
    method = FedAvg(lr=LR, steps=1, batch_size=None, weight_decay=decay)
    update = captured(model)
    names = dict(model.named_parameters())
    update = {n: (p - (p - (LR * decay * p + update[n]))).detach() for n, p in names.items()}
    report = audited(model, update, method=method)
    assert "masks of dropout were read off the update: 3" in report.notes
    assert report.findings[0].rows[0]["verified"]


def test_masks_show_behind_an_activation_that_keeps_zero() -> None:
    between = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 5))
    model = made(lambda: between)
    report = audited(model, captured(model))
    assert "masks of dropout were read off the update: 2" in report.notes
    assert report.findings[0].rows[0]["verified"]


def test_an_update_that_leaves_nothing_out_is_no_dropout() -> None:
    """It is that of a client that had dropout off, or something else moved all weights."""
    model = made(lambda: dense(nn.Dropout(0.9)))
    update = captured(model.eval())
    with pytest.raises(ValueError, match="are not read off this update"):
        audited(model.train(), update)
    assert audited(model, update, method=STILL).findings[0].rows[0]["verified"]


def test_dropout_in_a_forward_is_refused_and_named() -> None:
    model = made(Functional)
    with pytest.raises(ValueError, match=r"functional dropout.*masks of nn\.Dropout, and of .*, are read off"):
        audited(model, captured(model))
    still = made(lambda: Functional(drops=False))
    assert audited(still, captured(still)).findings[0].rows[0]["verified"]


def test_dropout_that_counts_as_off_is_named_where_the_picture_does_not_fit() -> None:
    model = made(lambda: dense(nn.Dropout(0.5)))
    report = audited(model, captured(model), method=STILL)
    assert "dropout (3) counts as off; if it was on" in report.mismatch
    assert not report.findings[0].rows[0]["verified"]


@pytest.mark.parametrize("before", [(), (nn.Hardtanh(-5, 5),)])
def test_a_masked_picture_is_called_that(before: tuple[nn.Module, ...]) -> None:
    model = made(lambda: nn.Sequential(*before, nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, 16), nn.Linear(16, 5)))
    update = captured(model)
    left_out = int((update[f"{len(before) + 2}.weight"] == 0).all(0).sum())
    report = audited(model, update)
    assert left_out
    assert f"{left_out} of 64 were left out or were 0" in report.notes[0]
    assert report.notes[0].endswith("which attacks call features, is the picture without them")
    assert report.findings[0].rows[0]["psnr"] is None


UNREAD = [
    (lambda: Rows(nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)), r"'series' \(MultiheadAttention\)"),
    (lambda: Rows(nn.LSTM(8, 8, 2, dropout=0.3, batch_first=True)), r"'series' \(LSTM\)"),
    (encoder, r"'series.self_attn' \(MultiheadAttention\), 'series.dropout' \(Dropout\)"),
    (lambda: dense(nn.AlphaDropout(0.3)), r"'3' \(AlphaDropout\)"),
    (lambda: nn.Sequential(nn.FeatureAlphaDropout(0.3), dense()), r"'0' \(FeatureAlphaDropout\)"),
    (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Dropout(0.3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 5)),
        "'1'",
    ),
    (lambda: dense(nn.RReLU()), r"'3' \(RReLU\)"),
    (Functional, r"the forward of Functional"),
]
"""Networks that draw what no update tells, and the modules that a refusal has to name."""


@pytest.mark.parametrize(("build", "named"), UNREAD)
def test_modules_whose_random_numbers_no_update_tells_are_named(build: Callable[[], nn.Module], named: str) -> None:
    model = made(build)
    update = captured(model)
    with pytest.raises(ValueError, match=named + r".*confirms nothing, call model\.eval\(\)"):
        audited(model, update)
    report = audited(model, update, method=STILL)
    (row,) = report.findings[0].rows
    assert row["psnr"] is None or not row["verified"]  # what a classifier was given is told whatever was drawn before
    assert "count as off" in report.mismatch or "counts as off" in report.mismatch


@pytest.mark.filterwarnings("ignore:dropout option")
def test_a_recurrent_layer_of_one_level_drops_nothing() -> None:
    model = made(lambda: Rows(nn.LSTM(8, 8, 1, dropout=0.3, batch_first=True)))
    assert not audited(model, captured(model)).mismatch
