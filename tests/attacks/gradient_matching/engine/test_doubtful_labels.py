"""Labels that a search ends with are called doubtful where the update does not tell them, also if it explained it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import attacks
from attacks.base import Reconstruction
from attacks.gradient_matching.engine.fit_check import EXPLAINED_BELOW, LABELS_SEARCHED
from attacks.labels.recovery import LABELS_COUNTED
from attacks.result import Remark
from defenses.prune import Prune
from fl.capture import from_batch
from fl.defense import Defense
from fl.methods.fedavg import FedAvg
from fl.seeds import stream

STEP = FedAvg(lr=0.1, steps=1, batch_size=None)


class Adapted(nn.Module):
    """A frozen linear layer and the product of two small ones beside it, of which the second begins at zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.lora_A = nn.Linear(width, 1, bias=False)
        self.lora_B = nn.Linear(1, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs (B, width)."""
        shown: Tensor = self.base(x) + self.lora_B(self.lora_A(x))
        return shown


def adapted(classes: int, *, trained: tuple[str, ...] = ("lora_A", "lora_B")) -> nn.Module:
    layers = [nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), Adapted(32), nn.ReLU(), nn.Linear(32, classes)]
    model = nn.Sequential(*layers)
    for name, value in model.named_parameters():  # small, as layers begin
        drawn = torch.rand(value.shape, generator=stream(0, name)) - 0.5
        value.data = 0 * drawn if "lora_B" in name else drawn / 4
    for name, value in model.named_parameters():
        value.requires_grad_(any(part in name for part in trained))
    return model


def searched(model: nn.Module, labels: list[int], defense: Defense | None = None) -> Reconstruction:
    images = torch.rand(len(labels), 1, 8, 8, generator=stream(3, "pictures"))
    view, _ = from_batch(model, images, torch.tensor(labels), method=STEP, defense=defense)
    result = attacks.build({"name": "ig", "iterations": 150, "restarts": 1})(view)
    assert isinstance(result, Reconstruction)
    assert result.misfit is not None
    assert result.misfit <= EXPLAINED_BELOW
    return result


def test_labels_that_adapters_do_not_tell_are_doubtful() -> None:
    """Pictures of other labels make the same few numbers of an adapter that begins at zero."""
    result = searched(adapted(10), [0, 3, 7, 9])
    assert result.labels is not None
    assert sorted(result.labels.tolist()) != [0, 3, 7, 9]
    assert Remark.LABELS_DOUBTFUL in result.remarks
    assert LABELS_SEARCHED in result.note


def test_labels_that_the_bias_of_the_classifier_tells_are_not() -> None:
    for labels in ([1], [2, 7]):
        result = searched(adapted(10, trained=("5.",)), labels)
        assert result.labels is not None
        assert result.labels.tolist() == labels
        assert Remark.LABELS_DOUBTFUL not in result.remarks


def test_counts_that_nothing_proves_are_doubtful() -> None:
    """Of few numbers that were sent."""
    result = searched(adapted(4, trained=("5.",)), [0, 1, 1, 3], defense=Prune(ratio=0.8))
    assert Remark.LABELS_DOUBTFUL in result.remarks
    assert LABELS_COUNTED in result.note
