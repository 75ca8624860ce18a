"""Noise to train and attack on, for benchmarks in which only time and memory are measured."""

from __future__ import annotations

import torch

import fl.models
from fl.client import Client
from fl.engines import EngineName
from fl.federation import ClientData, Federation
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.seeds import stream
from fl.types import Batch, Task
from fl.view import ServerView

BATCH = 50
STEP = FedAvg(lr=1.0, steps=1, batch_size=None)


def images(task: Task, count: int, *keys: object) -> Batch:
    """So many images of noise for `task`, on its device."""
    draw = stream(0, "images", *keys)
    labels = torch.randint(0, task.num_classes, (count,), generator=draw)
    where = next(iter(task.parameters.values())).device
    return Batch(torch.rand(count, *task.input_shape, generator=draw).to(where), labels.to(where))


def federation(
    task: Task, method: Method, *, clients: int, each: int, engine: EngineName, workers: int = 1
) -> Federation:
    """So many clients of `each` images, with a single one to test on."""
    parts = (images(task, each, number) for number in range(clients))
    data = [ClientData(own, own.take(torch.arange(1, device=own.labels.device))) for own in parts]
    return Federation(Client(task, method), data, engine=engine, workers=workers)


def victims(network: str, count: int, method: Method = STEP) -> list[ServerView]:
    """So many clients' views of one step on a single image, of FedAvg unless said."""
    task = fl.models.build(network, num_classes=10, seed=0)
    run = federation(task, method, clients=1, each=count, engine="loop")
    return [run.observe(0, data=run.data[0].train.take(torch.tensor([i])))[0] for i in range(count)]
