"""The network, the data and the training loop of the app."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """Two convolutions and three linear layers, as tutorials have them, for pictures (3, 32, 32) in [0, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.conv1(x)))
        x = self.pool(torch.relu(self.conv2(x)))
        x = x.flatten(1)
        return self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x)))))


def load_data(partition: int, batch_size: int) -> DataLoader:
    """Smooth random pictures of the partition: one in partition 0, the leak that is planted, 64 in all others."""
    generator = torch.Generator().manual_seed(partition)
    count = 1 if partition == 0 else 64
    coarse = torch.rand(count, 3, 8, 8, generator=generator)
    images = nn.functional.interpolate(coarse, size=32, mode="bicubic").clamp(0, 1)
    labels = torch.randint(10, (count,), generator=generator)
    return DataLoader(TensorDataset(images, labels), batch_size, shuffle=True, generator=generator)


def train(net: nn.Module, loader: DataLoader, epochs: int, lr: float) -> float:
    """Train by SGD and return the mean loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    net.train()
    losses = []
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)
