"""Models that people have and nobody thought of: a true verdict, or a refusal with a true reason, and no traceback."""

from __future__ import annotations

import pytest
import torch
from support.chains import initialized
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import hyperleak
from attacks.base import NotApplicable, Reconstruction, Remark, build
from attacks.verification.confirmation import confirm
from attacks.verification.words import ROUNDED_FURTHER
from fl.capture import from_batch, from_update
from fl.losses.function import GivenFunction, known_loss
from fl.losses.segmentation import Segmentation
from fl.methods.fedavg import FedAvg
from fl.seeds import stream
from fl.tensors import dense

ONE = torch.tensor([1])


def picture(size: int = 8) -> Tensor:
    return (torch.rand(1, 3, size, size, generator=stream(0, "picture")) * 255).round() / 255


class LastStep(nn.Module):
    """Causal convolutions, of which the last step alone is taken: it sees seven steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv1d(2, 16, 3), nn.Conv1d(16, 16, 3, dilation=2), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        once = functional.pad(x, (2, 0))
        twice = functional.pad(self.first(once).relu(), (4, 0))
        return self.head(self.second(twice).relu()[:, :, -1])


def test_a_series_of_which_most_steps_are_not_seen_is_not_borne_out() -> None:
    series = torch.rand(1, 2, 24, generator=stream(0, "series"))
    view, truth = from_batch(initialized(LastStep()).float(), series, ONE)
    result = build("cascade")(view)
    if isinstance(result, Reconstruction) and not torch.allclose(result.inputs, truth.inputs, atol=0.01):
        assert not result.verified
        assert not result.approximate


class Experts(nn.Module):
    """Each picture goes by itself to the expert of the largest gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(192, 3)
        self.experts = nn.ModuleList(nn.Linear(192, 16) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        gates = self.gate(flat).softmax(1)
        rows = zip(gates.argmax(1), flat, gates, strict=True)
        return self.head(torch.stack([self.experts[int(k)](row).relu() * gate[int(k)] for k, row, gate in rows]))


def test_an_example_that_is_taken_out_of_its_batch_is_refused_with_a_reason() -> None:
    view, _ = from_batch(initialized(Experts()).float(), picture(), ONE)
    assert isinstance(build("cascade")(view), NotApplicable)
    (found,) = hyperleak.audit(initialized(Experts()).float(), picture(), ONE, attacks=["analytic"]).findings
    assert found.verified
    assert found.leaked


class Observing(nn.Module):
    """Keeps the largest number of each channel, for which it has no room at first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.ones(1))
        self.norm = nn.BatchNorm1d(192)
        self.head = nn.Linear(192, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.largest.resize_(3).copy_(x.detach().amax((0, 2, 3)))
        return self.head(self.norm(x.flatten(1)))


def test_a_buffer_that_takes_another_shape_is_named() -> None:
    two = torch.cat([picture(), 1 - picture()])
    with pytest.raises(ValueError, match=r"keep their shapes.*'largest' of \(1,\) before and \(3,\) after.*once"):
        hyperleak.audit(Observing().train(), two, torch.tensor([0, 1]), batch_size=2, attacks=["analytic"])


def aligned(outputs: Tensor, targets: Tensor) -> Tensor:
    steps = [torch.full((len(outputs),), shape) for shape in (outputs.shape[2], targets.shape[1])]
    return functional.ctc_loss(outputs.permute(2, 0, 1).log_softmax(2), targets, *steps)


def test_a_loss_of_sequences_is_not_taken_for_one_of_steps() -> None:
    own, steps = GivenFunction(call=aligned), torch.Size((6, 8))
    assert known_loss(own, steps) == own
    assert known_loss(GivenFunction(call=functional.cross_entropy), steps) == Segmentation()


class Checkpointed(nn.Module):
    """Asks for a gradient of what it is given, as reentrant checkpoints do."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 16, 5, stride=2, padding=2), nn.Linear(256, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x.requires_grad_(), use_reentrant=True).tanh().flatten(1))


def test_a_model_that_asks_for_gradients_of_its_inputs_fails_no_attack() -> None:
    report = hyperleak.audit(initialized(Checkpointed()).float(), picture(), ONE, attacks=["analytic", "rconv"])
    assert not any(found.failed for found in report.findings)


class Autoencoder(nn.Module):
    """Returns numbers behind a sigmoid, whose slope the last bias's gradient has in it."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.back = nn.Linear(192, 24), nn.Linear(24, 192)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.code(x.flatten(1)).relu()).sigmoid()


def test_numbers_behind_a_sigmoid_are_not_taken_for_those_before_it() -> None:
    report = hyperleak.audit(Autoencoder(), picture(), picture().flatten(1), loss="mse", attacks=["analytic"])
    (found,) = report.findings
    assert report.mismatch == ""
    assert found.verified is not False
    assert found.leaked


class Cropping(nn.Module):
    """A perceptron of the middle of a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(108, 24), nn.Sigmoid(), nn.Linear(24, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x[:, :, 1:7, 1:7])


def test_a_search_is_scored_by_the_pixels_that_the_network_is_given() -> None:
    search = {"name": "ig", "iterations": 2, "restarts": 1}
    (found,) = hyperleak.audit(Cropping(), picture(), ONE, attacks=[search]).findings
    (row,) = found.rows
    assert row["seen"] == pytest.approx(36 / 64)
    assert row["psnr_seen"] is not None


def test_numbers_read_off_a_rounded_bias_do_not_speak_against_the_right_picture() -> None:
    model = initialized(nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 192))).float()
    names, target = dict(model.named_parameters()), picture().flatten(1)
    grads = torch.autograd.grad(functional.mse_loss(model(picture()), target), list(names.values()))
    update = {n: (p - (p - 0.01 * grad)).detach() for (n, p), grad in zip(names.items(), grads, strict=True)}
    method = FedAvg(lr=0.01, steps=1, batch_size=None)
    found = build("analytic")(from_update(model, update, input_shape=(3, 8, 8), loss="mse", method=method))
    assert isinstance(found, Reconstruction)
    assert found.verified is True, found.note


def test_two_bytes_a_number_leave_it_open_whether_a_picture_is_right() -> None:
    body = nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, stride=2, padding=1), nn.ReLU()
    model = initialized(nn.Sequential(*body, nn.Flatten(), nn.Linear(192, 10))).float()
    view, truth = from_batch(model, picture(), ONE)
    sent = {n: (1024 * dense(v)).half() for n, v in view.update.items()}
    view = from_update(model, sent, input_shape=(3, 8, 8), kind="gradient")
    near = truth.inputs + 1e-3 * torch.randn(truth.inputs.shape, generator=stream(0, "near"))
    found = confirm(view, Reconstruction(inputs=near, verified=False, remarks=frozenset({Remark.PARTLY_TOLD})))
    assert isinstance(found, Reconstruction)
    assert found.verified is None
    assert ROUNDED_FURTHER in found.note
