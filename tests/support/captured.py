"""The small network whose updates are captured."""

import torch
from torch import nn

from fl.seeds import stream

SHAPE, CLASSES = (1, 6, 6), 5


def network(norm: bool = False) -> nn.Sequential:
    """A convolution, with batch normalization or without, and a classifier for images of `SHAPE`."""
    layers = [nn.Conv2d(1, 4, 3), *([nn.BatchNorm2d(4)] if norm else []), nn.Sigmoid(), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(64, CLASSES))
    generator = stream(0, "captured")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return model
