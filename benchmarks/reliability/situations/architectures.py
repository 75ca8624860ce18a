"""Networks for inputs and outputs beyond one picture and its logits, and in the styles in which people write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.reliability.situations.networks import CLASSES


class Functional(nn.Module):
    """Flower's quickstart network: activations and pooling are functions in `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.pool = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5), nn.MaxPool2d(2, 2)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, K)."""
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x))).view(-1, 400)
        logits: Tensor = self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))
        return logits


class Reused(nn.Module):
    """A chain of strided convolutions with one activation object for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 24, 5, 2, 2), nn.Conv2d(24, 48, 5, 2, 2)
        self.active, self.head = nn.LeakyReLU(0.2), nn.Linear(48 * 64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, K)."""
        logits: Tensor = self.head(self.active(self.second(self.active(self.first(x)))).flatten(1))
        return logits


class Before(nn.Module):
    """A convolution behind what a function makes of pixels."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.layer, self.head = function, nn.Conv2d(3, 30, 3, padding=1), nn.Linear(30 * 1024, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, K)."""
        logits: Tensor = self.head(F.leaky_relu(self.layer(self.function(x)), 0.2).flatten(1))
        return logits


class Scaled(nn.Module):
    """A network that normalizes by arithmetic of its own."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.49, 0.48, 0.45]).view(3, 1, 1))
        self.body = Reused()

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, K) of pixels in [0, 1]."""
        logits: Tensor = self.body((x - self.mean) / 0.25)
        return logits


class ViT(nn.Module):
    """A small vision transformer with a learned position embedding and the mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.pos = nn.Conv2d(3, 32, 8, stride=8), nn.Parameter(torch.randn(1, 16, 32) * 0.02)
        self.encoder = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, K)."""
        logits: Tensor = self.head(self.encoder(self.patch(x).flatten(2).mT + self.pos).mean(1))
        return logits


class Several(NamedTuple):
    """Logits among others."""

    logits: Tensor
    features: Tensor


class Wrapped(nn.Module):
    """A dense network of pictures that returns what `form` makes of logits and features."""

    def __init__(self, form: Callable[[Tensor, Tensor], Any], outputs: int = CLASSES) -> None:
        super().__init__()
        self.body, self.head, self.form = nn.Linear(3072, 64), nn.Linear(64, outputs), form

    def forward(self, x: Tensor) -> Any:
        """Return what `form` makes."""
        features = self.body(x.flatten(1)).relu()
        return self.form(self.head(features), features)


class Detector(nn.Module):
    """A detector of one object: its class and its box."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes, self.box = nn.Linear(3072, 64), nn.Linear(64, 4), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Return logits (B, 4) and boxes (B, 4) in [0, 1]."""
        features = self.body(x.flatten(1)).relu()
        return {"classes": self.classes(features), "boxes": self.box(features).sigmoid()}


def class_and_box(found: dict[str, Tensor]) -> Tensor:
    """Return logits and box of a detector in one tensor (B, 8)."""
    return torch.cat([found["classes"], found["boxes"]], 1)


def detection_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return cross entropy of classes (B, 4) plus L1 distance of boxes (B, 4), as YOLO and its like weigh both."""
    return F.cross_entropy(outputs[:, :4], targets[:, :4]) + F.l1_loss(outputs[:, 4:], targets[:, 4:])


def focal_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the focal loss (Lin et al., ICCV 2017, equation 5) of logits (B, K) and shares of classes (B, K)."""
    log = outputs.log_softmax(1)
    return -(targets * (1 - log.exp()).square() * log).sum(1).mean()


class TwoInputs(nn.Module):
    """A network of a picture and of a table's row."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.row, self.head = nn.Linear(3072, 64), nn.Linear(6, 64), nn.Linear(64, CLASSES)

    def forward(self, image: Tensor, row: Tensor) -> Tensor:
        """Return logits (B, K)."""
        logits: Tensor = self.head(torch.tanh(self.image(image.flatten(1)) + self.row(row)))
        return logits


class Recurrent(nn.Module):
    """A recurrent network over a series (B, C, T) and a classifier of its last state."""

    def __init__(self, kind: type[nn.GRU] | type[nn.LSTM]) -> None:
        super().__init__()
        self.cells, self.head = kind(2, 32, batch_first=True), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, 3)."""
        logits: Tensor = self.head(self.cells(x.transpose(1, 2))[0][:, -1])
        return logits


class Bag(nn.Module):
    """A bag of embedded words and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(1000, 32), nn.Linear(32, 4)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits (B, 4)."""
        logits: Tensor = self.head(self.words(ids))
        return logits


class Text(nn.Module):
    """A small transformer over ids of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(1000, 32), nn.Embedding(24, 32)
        self.encoder = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 4)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits (B, 4)."""
        states = self.encoder(self.words(ids) + self.places.weight)
        logits: Tensor = self.head(states.mean(1))
        return logits


class Language(nn.Module):
    """A small GPT-2: a causal transformer over ids, whose embedding scores the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(1000, 64), nn.Embedding(24, 64)
        self.block = nn.TransformerEncoderLayer(64, 4, 128, 0.0, "gelu", batch_first=True, norm_first=True)
        self.norm, self.scores = nn.LayerNorm(64), nn.Linear(64, 1000, bias=False)
        self.scores.weight = self.words.weight
        with torch.no_grad():
            self.words.weight.mul_(0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits (B, 1000, T)."""
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        states = self.block(self.words(ids) + self.places.weight, src_mask=mask, is_causal=True)
        logits: Tensor = self.scores(self.norm(states)).mT
        return logits


class Ratings(nn.Module):
    """Factorizes a matrix of ratings, by the ids of a user and of an item."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(50, 8), nn.Embedding(80, 8)

    def forward(self, pairs: Tensor) -> Tensor:
        """Return a rating for each pair (B, 2)."""
        return (self.users(pairs[:, 0]) * self.items(pairs[:, 1])).sum(1)


class FakeQuantized(nn.Linear):
    """A linear layer that trains for weights in 8 bits (Jacob et al., CVPR 2018)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, out) of (B, in)."""
        step = float(self.weight.detach().abs().max()) / 127
        return F.linear(x, torch.fake_quantize_per_tensor_affine(self.weight, step, 0, -128, 127), self.bias)
