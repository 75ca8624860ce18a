"""Canaries at client level: each is a client, and the auditor reads the server's weights, round by round.

A canary's update is far longer than the clip and points along a number of its own, all of them in one tensor at a time:
noise that is missing there, or a clip that does not reach it, is then seen at its full size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl.client import Client
from fl.federation import ClientData, Federation
from fl.method import ServerState
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
from fl.privacy.private_method import PrivateMethod
from fl.seeds import derive_seed
from fl.tensors import dense
from fl.types import Batch, Task, Upload

FAR = 20.0
"""How long the updates of canaries are, in units of the clip."""
Floats = NDArray[np.float64]


class ParameterVector(nn.Module):
    """A network whose tensors have a number for every canary each; nobody runs it.

    Args:
        size: how many canaries.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.body = nn.utils.skip_init(nn.Linear, 1, size, dtype=torch.float64)
        self.head = nn.utils.skip_init(nn.Linear, -(-size // 2), 2, bias=False, dtype=torch.float64)
        with torch.no_grad():
            for value in self.parameters():
                value.zero_()


def noisy_client_releases(
    method: PrivateMethod, signs: Floats, coins: Tensor, seed: int
) -> Iterator[tuple[str, Floats]]:
    """Yield what the server's weights give away of every canary (rounds, m), tensor by tensor, in units of the clip.

    Yields:
        The name of a tensor and what canaries in it show, for every shared one that has a number for each of them.

    Args:
        method: at client level.
        signs: (rounds, m) of what the canaries send, so that noise used twice can't hide behind the same sum.
        coins: (m,) which canaries send an update far longer than the clip; the others send zero.
        seed: of the noise.
    """
    one, size = replace(method, noise_multiplier=method.sigma, epsilon=None), len(coins)
    if isinstance(made := getattr(one, "parametrization", None), Hypernetwork):  # the server's rule is of no size
        one = replace(one, parametrization=replace(made, hidden=2, embedding=-(-size // 2)))
    task = Task(ParameterVector(size), (1, 1, 1), 2, "head.")
    nobody = Batch(torch.zeros(1, 1, 1, 1).double(), torch.zeros(1, dtype=torch.int64))
    server = Federation(Client(task, one), [ClientData(nobody, nobody)], seed=derive_seed(seed, "audit")).server
    for name, value in server.shared.items():
        if value.numel() >= size:
            yield name, _read(one, task, server, name, signs * coins.numpy())


def _read(method: PrivateMethod, task: Task, server: ServerState, place: str, signs: Floats) -> Floats:
    """Return the noisy sums of the canaries in the tensor `place`, round by round (rounds, m)."""
    rounds, size = signs.shape
    zero = {name: torch.zeros_like(dense(value)) for name, value in server.shared.items()}
    read = np.empty(signs.shape, dtype=np.float32 if signs.size > 2**24 else np.float64)
    for number in range(rounds):
        uploads = []
        for canary, sign in enumerate(signs[number]):
            update = zero
            if sign:
                update = {**zero, place: zero[place].clone()}
                update[place].view(-1)[canary] = FAR * method.clip * sign
            # one of many images, which must not count for more
            uploads.append(Upload(canary, FAR if sign else 1.0, {**update}))
        after = method.aggregate(server, uploads, task)
        moved = dense(server.shared[place]) - dense(after.shared[place])
        read[number] = moved.view(-1)[:size] * (size / method.clip)
        server = after
    return read
