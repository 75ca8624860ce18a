"""Models as people have them: each is attacked, or refused with a true reason and a way on."""

import warnings
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import attacks
import hyperleak
from attacks.base import NotApplicable
from eval.metrics.score import score
from fl.capture import from_batch, from_update
from fl.seeds import stream

Named = namedtuple("Named", ["logits", "features"])
ROW = torch.rand(1, 12, generator=stream(0, "row")) * 6 - 3
IMAGE = torch.rand(1, 3, 8, 8, generator=stream(0, "image"))
SERIES = torch.rand(1, 2, 24, generator=stream(0, "series"))
PAIR = torch.rand(2, 3, 8, 8, generator=stream(0, "pair"))
ONE = torch.tensor([1])


def drawn(model: nn.Module) -> nn.Module:
    generator = stream(0, "own")
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(0, 0.3, generator=generator)
    return model


def mlp(outputs: int, inputs: int = 12) -> nn.Module:
    return drawn(nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, outputs)))


class Wrapped(nn.Module):
    """A model whose output is made of a classifier's by `form`."""

    def __init__(self, form) -> None:
        super().__init__()
        self.body, self.form = mlp(3), form

    def forward(self, x: Tensor) -> object:
        return self.form(self.body(x))


class TwoInputs(nn.Module):
    """A model of numbers and of categories, given by the names of its arguments."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.numbers, self.other, self.head = nn.Linear(12, 16), nn.Linear(5, 16, bias=bias), nn.Linear(16, 3)
        drawn(self)

    def forward(self, numbers: Tensor, other: Tensor) -> Tensor:
        return self.head(torch.tanh(self.numbers(numbers) + self.other(other)))


class Recurrent(nn.Module):
    """A GRU over a series (B, C, T)."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(2, 8, batch_first=True), nn.Linear(8, 3)
        drawn(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x.transpose(1, 2))[0][:, -1])


class Squeezed(nn.Module):
    """A classifier without a linear layer: a convolution and the mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.classifier = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)
        drawn(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.tanh(self.features(x))).mean((2, 3))


def first(name: str, model: nn.Module, inputs, labels, **settings):
    view, truth = from_batch(model, inputs, labels, **settings)
    spec = {"name": name, "iterations": 150} if name in ("ig", "dlg") else name
    found = attacks.build(spec)(view)
    rows = [] if isinstance(found, NotApplicable) else score(found, truth, task=view.task)
    return found, rows


def l1(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.l1_loss(outputs, targets)


EXACT = {
    "table": (mlp(3), ROW, ONE, {}),
    "one logit": (mlp(1), ROW, torch.tensor([1.0]), {"loss": "bce"}),
    "one logit, labels as classes": (mlp(1), ROW, ONE, {"loss": "bce"}),
    "many labels": (mlp(4), ROW, torch.tensor([[1.0, 0, 1, 0]]), {"loss": "bce"}),
    "regression": (mlp(1), ROW, torch.tensor([2.5]), {"loss": "mse"}),
    "several numbers": (mlp(2), ROW, torch.tensor([[2.5, -1]]), {"loss": nn.MSELoss()}),
    "own loss": (mlp(2), ROW, torch.tensor([[2.5, -1]]), {"loss": l1}),
    "own loss by name": (mlp(2), ROW, torch.tensor([[2.5, -1]]), {"loss": "torch.nn.functional:l1_loss"}),
    "dictionary": (Wrapped(lambda y: {"logits": y, "other": y}), ROW, ONE, {}),
    "named tuple": (Wrapped(lambda y: Named(y, y)), ROW, ONE, {}),
    "tuple": (Wrapped(lambda y: (y + 1, y)), ROW, ONE, {"output": 1}),
    "data parallel": (nn.DataParallel(mlp(3)), ROW, ONE, {}),
    "compiled": (lambda: torch.compile(mlp(3)), ROW, ONE, {}),  # whose compiler takes seconds to import
}


@pytest.mark.parametrize("case", EXACT)
def test_a_first_dense_layer_gives_the_row_away_under_any_loss(case):
    made, inputs, labels, settings = EXACT[case]
    model = made if isinstance(made, nn.Module) else made()
    found, (row,) = first("analytic", model, inputs, labels, input_range=(-3, 3), **settings)
    assert found.verified is True, found.note
    assert row["psnr"] > 80
    assert row["row_accuracy"] == 1
    if "own" in case:
        assert "the label is not told" in found.note
    if "own" not in case:
        assert row["label_correct"] or row["label_error"] < 1e-3


@pytest.mark.parametrize("bias", [True, False])
def test_each_of_several_inputs_is_read_where_a_dense_layer_is_given_it(bias):
    model = TwoInputs(bias=bias)
    inputs = {"numbers": ROW, "other": ROW[:, :5] / 2}
    view, truth = from_batch(model, inputs, ONE, input_range=(-3, 3))
    found = attacks.build("analytic")(view)
    back = view.task.inputs.restore(found.inputs)
    torch.testing.assert_close(back["numbers"], inputs["numbers"], rtol=1e-4, atol=1e-4)
    (row,) = score(found, truth, task=view.task)
    if bias:
        assert found.verified is True
        torch.testing.assert_close(back["other"], inputs["other"], rtol=1e-4, atol=1e-4)
    else:
        assert found.verified is None
        assert "no layer with a bias is given the input(s) other" in found.note
        assert found.fixed.sum() == 12
        assert row["psnr"] < 40


SEARCHED = {
    "one logit": (mlp(1), ROW, torch.tensor([1.0]), {"loss": "bce", "input_range": (-3, 3)}),
    "many labels": (mlp(4), ROW, torch.tensor([[1.0, 0, 1, 0]]), {"loss": "bce", "input_range": (-3, 3)}),
    "regression": (mlp(1), ROW, torch.tensor([2.5]), {"loss": "mse", "input_range": (-3, 3)}),
    "two inputs": (TwoInputs(), {"numbers": ROW, "other": ROW[:, :5]}, ONE, {"input_range": (-3, 3)}),
    "convolution over steps": (
        drawn(nn.Sequential(nn.Conv1d(2, 12, 5), nn.Tanh(), nn.Flatten(), nn.Linear(240, 3))),
        SERIES,
        ONE,
        {},
    ),
    "head of a convolution": (Squeezed(), IMAGE, ONE, {"head": "classifier."}),
}


@pytest.mark.parametrize("case", SEARCHED)
def test_searches_take_any_loss_and_any_inputs(case):
    model, inputs, labels, settings = SEARCHED[case]
    found, rows = first("ig", model, inputs, labels, **settings)
    assert found.misfit < 0.1
    assert all(row["psnr"] is not None and row["psnr"] > row["floor_grey_psnr"] for row in rows)


REFUSALS = {
    "unnamed outputs": (
        Wrapped(lambda y: (y, y)),
        ROW,
        ONE,
        {"input_range": (-3, 3)},
        r"tuple of 0 \(1, 3\), 1 \(1, 3\); say which",
    ),
    "numbers beyond [0, 1]": (mlp(3), ROW, ONE, {}, "state what the attacker knows of their range"),
    "one logit without a loss": (mlp(1), ROW, ONE, {"input_range": (-3, 3)}, "give loss='bce'"),
    "masks without a loss": (nn.Conv2d(3, 4, 1), IMAGE, ONE, {}, "loss='segmentation'"),
    "head of a convolution": (Squeezed(), IMAGE, ONE, {}, r"give head='its.prefix.'"),
    "own loss of a method": (mlp(1), ROW, ONE, {"loss": "bce", "method": "moon"}, "moon has a loss of its own"),
    "own training": (mlp(1), ROW, ONE, {"loss": "bce", "defense": "mixup"}, "mixup mixes labels"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_can_not_be_taken_is_refused_with_a_way_on(case):
    model, inputs, labels, settings, said = REFUSALS[case]
    with pytest.raises(ValueError, match=said):
        hyperleak.audit(model, inputs, labels, **settings)


@pytest.mark.parametrize("name", ["analytic", "rconv", "cascade", "backsolve", "spear", "april", "rgap", "rog"])
@pytest.mark.parametrize("case", ["recurrent", "segmentation", "training mode", "compiled search"])
def test_exact_attacks_refuse_by_name_what_they_do_not_take(case, name):
    if case == "recurrent":
        found, _ = first(name, Recurrent(), SERIES, ONE)
    elif case == "segmentation":
        model = drawn(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 4, 1)))
        masks = torch.zeros(1, 8, 8, dtype=torch.int64)
        settings = {"name": name, "iterations": 3} if name == "rog" else name
        view, _ = from_batch(model, IMAGE, masks, loss="segmentation")
        found = attacks.build(settings)(view)
    elif case == "training mode":
        layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)
        settings = {"name": name, "iterations": 3} if name == "rog" else name
        view, _ = from_batch(drawn(nn.Sequential(*layers)), PAIR, torch.tensor([0, 1]))
        found = attacks.build(settings)(view)
    else:
        model = drawn(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Hardsigmoid(), nn.Flatten(), nn.Linear(144, 3)))
        found, _ = first("ig", model, IMAGE, ONE)
        assert isinstance(found, NotApplicable)
    if isinstance(found, NotApplicable):
        assert found.reason
    else:
        assert found.verified is not True or found.inputs is None or name == "backsolve"


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_weights_that_a_layer_computes_are_taken(norm):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.Flatten(), norm(nn.Linear(192, 8)), nn.Tanh(), nn.Linear(8, 3))
    model(IMAGE)
    found, rows = first("ig", model.eval(), IMAGE, ONE)
    assert isinstance(found, NotApplicable) or rows[0]["psnr"] is not None


def test_a_categorical_table_is_searched_by_its_categories():
    row = torch.cat([ROW[:, :3], functional.one_hot(torch.tensor([2]), 4), functional.one_hot(torch.tensor([5]), 7)], 1)
    model = drawn(nn.Sequential(nn.Linear(14, 32), nn.Sigmoid(), nn.Linear(32, 2)))
    found, (scores,) = first("ig", model, row, ONE, input_range=(-3, 3), categories=[(3, 7), (7, 14)])
    assert scores["categories_right"] == 1
    assert scores["row_accuracy"] > scores["floor_mean_row_accuracy"]
    parts = found.inputs.flatten(1)[:, 3:14]
    torch.testing.assert_close(parts.sum(), torch.tensor(2.0))


def test_masks_are_searched_for_together_with_the_picture():
    model = drawn(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 4, 1)))
    masks = torch.randint(0, 4, (1, 8, 8), generator=stream(0, "mask"))
    found, (row,) = first("ig", model, IMAGE, masks, loss="segmentation")
    assert found.labels.shape == masks.shape
    assert 0 <= row["label_error"] <= 1


def test_targets_of_a_loss_of_ones_own_are_searched_for_if_it_says_what_they_are():
    def view_of(**settings):
        return from_batch(mlp(2), ROW, torch.tensor([[0.5, -1.0]]), input_range=(-3, 3), **settings)[0]

    found = attacks.build("ig")(view_of(loss=l1))
    assert isinstance(found, NotApplicable)
    assert "--targets free" in found.reason
    free = {"name": "function", "function": "torch.nn.functional:l1_loss", "targets": "free"}
    assert not isinstance(attacks.build({"name": "ig", "iterations": 5})(view_of(loss=free)), NotApplicable)


def test_an_update_of_another_loss_is_attacked_without_its_inputs():
    model = mlp(1)
    loss = functional.binary_cross_entropy_with_logits(model(ROW), torch.tensor([[1.0]]))
    gradient = dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, [*model.parameters()]), strict=True))
    view = from_update(model, gradient, input_shape=(12,), loss="bce", input_range=(-3, 3))
    found = attacks.build("analytic")(view)
    torch.testing.assert_close(view.task.inputs.restore(found.inputs), ROW, rtol=1e-3, atol=1e-3)
    assert found.labels.tolist() == [[1.0]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("audit")


def test_an_audit_of_a_table_says_how_many_columns_are_right(folder):
    report = hyperleak.audit(mlp(1), ROW, torch.tensor([1.0]), loss="bce", input_range=(-3, 3), out=folder / "table")
    (finding, *others) = report.findings
    assert finding.leaked
    assert "100 % of the columns right (TabLeak's accuracy)" in finding.verdict
    assert "row content leaked: 1 of 1 row(s) came back" in finding.verdict
    assert "image" not in finding.verdict
    assert all("not needed" in other.verdict for other in others)
    assert not [*(folder / "table" / "images").glob("*.png")]


def test_an_audit_of_ids_says_which_were_read(folder):
    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.EmbeddingBag(50, 8), nn.Linear(8, 3)

        def forward(self, input_ids: Tensor, weights: Tensor) -> dict[str, Tensor]:
            return {"logits": self.head(self.embedding(input_ids)) * weights}

    ids = torch.tensor([[3, 9, 9, 11], [4, 4, 8, 3]])
    report = hyperleak.audit(
        drawn(Text()), {"input_ids": ids, "weights": torch.ones(2, 1)}, torch.tensor([1, 2]), batch_size=2
    )
    assert [finding.attack for finding in report.findings] == ["tokens", "analytic"]
    assert report.findings[0].leaked
    assert "ids leaked: 5 of the 5 that occur were read off the embeddings" in report.findings[0].verdict
    assert report.open_questions({}) == []
