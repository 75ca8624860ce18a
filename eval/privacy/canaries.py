"""An audit of noisy steps, a method's or a defense's: canaries in or out by the toss of a coin, told apart by them.

Each canary is a record whose gradient points along a coordinate of its own and is longer than the clip (Nasr et al.,
USENIX Security 2023, call it a Dirac canary), so that its part of a step has the greatest length there may be, and none
disturbs another. A small federation of the method itself trains on them, one step a round, and the auditor reads every
step: batches, clipping, noise and its keys are those of the method (clipping and noise those of the defense). Where
clients are protected, by the server, canaries are clients (`eval.privacy.client_canaries`). What an audit proves of
epsilon is a lower bound, to be held against the one that is claimed.

    from eval.privacy.canaries import audit
    found = audit(DPFedAvg(epsilon=4.0, rounds=20, images=600), sizes=[600] * 10, rounds=20)
    print(found.sentence())
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from defenses.dp_sgd import DPSGD
from eval.privacy import client_canaries, epsilon_bounds
from fl.client import Client
from fl.defense import Defense
from fl.federation import ClientData, Federation
from fl.local.sampling import PoissonPhase
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.privacy.private_method import PrivateMethod
from fl.privacy_statement import PrivacyStatement
from fl.seeds import derive_seed, stream
from fl.tensors import Tensors, dense
from fl.types import Batch, Phase, Task

CANARIES = 1000
"""Canaries of the audit that a run makes by itself."""
SIGNIFICANCE = 0.01
"""Significance of that audit."""
BLOCK, FAR = 1000, 20.0
"""Canaries on one client at most, and how large their one pixel is in units of the clip: gradients are far longer."""
WINDOWS, PAIRED = 32, 400
"""Parts of the training that are looked at by themselves, and steps that are searched for noise used twice."""
ALIKE = 0.5
"""Correlation from which on the noise of two steps counts as the same."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class CanaryAudit:
    """What an audit found.

    Attributes:
        lower: epsilon is at least this if the trade-off of the method's steps is Gaussian; 0 where nothing was told.
        claimed: epsilon that the method claims for these steps.
        ceiling: what `lower` would be if all canaries had been told apart.
        canaries: how many.
        steps: how many were read.
        delta: for which all three are.
        significance: probability with which `lower` may be wrong.
    """

    lower: float
    claimed: float
    ceiling: float
    canaries: int
    steps: int
    delta: float
    significance: float

    @property
    def refuted(self) -> bool:
        """Whether the claim is wrong, but for chance."""
        return self.lower > self.claimed

    def sentence(self) -> str:
        """Say in a sentence what the audit found, with all its figures."""
        told = "refutes" if self.refuted else "does not refute"
        return (
            f"{self.canaries:,} canaries through {self.steps:,} steps: epsilon is at least {self.lower:.3g} "
            f"({1 - self.significance:.0%} sure, if Gaussian), which {told} the {self.claimed:.3g} claimed at delta "
            f"{self.delta:.1g}; at most {self.ceiling:.3g} could have been shown"
        )


def audit(
    method: Method,
    sizes: Sequence[int],
    rounds: int,
    *,
    canaries: int = CANARIES,
    seed: int = 0,
    significance: float = SIGNIFICANCE,
) -> CanaryAudit:
    """Audit the noisy steps of a method, as many and at the rate that `method.privacy(sizes, rounds)` charges.

    Takes 5 to 10 ms a step for every thousand canaries on one core, at client level 0.1 to 0.4 s a round.

    Args:
        method: with differential privacy, of records or of clients.
        sizes: the clients' numbers of images.
        rounds: that a client takes part in.
        canaries: how many; more show more.
        seed: of coins, batches and noise (unless that is the operating system's).
        significance: probability with which the bound may be wrong.

    Raises:
        ValueError: the method claims no epsilon, or one that canaries in single steps can't test; says why.
    """
    statement = method.privacy(sizes, rounds)
    if statement is None or not isinstance(method, PrivateMethod):
        raise ValueError(f"{method.name} claims no differential privacy: there is nothing to audit")

    def told(coins: Tensor) -> Floats:
        if statement.unit == "client":
            shape = (statement.steps, len(coins))
            signs = 1 - 2 * torch.randint(2, shape, generator=stream(seed, "canaries", "signs")).double().numpy()
            every = client_canaries.noisy_client_releases(method, signs, coins, seed)
            return np.concatenate([canary_scores(read, coins.numpy(), signs) for _, read in every])
        return canary_scores(
            noisy_releases(single_step_method(method, statement.rate), statement.steps, coins, seed), coins.numpy()
        )

    return _audited(told, statement, canaries, seed, significance)


def audit_defense(
    client: Client,
    sizes: Sequence[int],
    rounds: int,
    *,
    canaries: int = CANARIES,
    seed: int = 0,
    significance: float = SIGNIFICANCE,
) -> CanaryAudit:
    """Audit the noisy steps of a client's defense (`dp-sgd`), at the rate that its claim charges.

    What other defenses do to the update comes after the noise, and is left out.

    Args:
        client: method and defense.
        sizes: the clients' numbers of images.
        rounds: that a client takes part in.
        canaries: how many; more show more.
        seed: of coins, batches and noise.
        significance: probability with which the bound may be wrong.

    Raises:
        ValueError: as `audit`.
    """
    statement = client.defense.privacy(client.method, client.task, sizes, rounds)
    found = [part for part in client.defense.members() if isinstance(part, DPSGD)]
    if statement is None:
        raise ValueError(f"{client.defense.name} claims no differential privacy: there is nothing to audit")
    if not found:
        raise ValueError(f"{client.defense.name} adds noise to whole updates: canaries audit steps of dp-sgd alone")
    steps = single_step_defense(found[0], statement.rate)

    def told(coins: Tensor) -> Floats:
        return canary_scores(noisy_releases(steps, statement.steps, coins, seed), coins.numpy())

    return _audited(told, statement, canaries, seed, significance)


def _audited(
    told: Callable[[Tensor], Floats], statement: PrivacyStatement, canaries: int, seed: int, significance: float
) -> CanaryAudit:
    if statement.epsilon is None:
        raise ValueError(f"no epsilon is claimed: {statement.reason}")
    if not statement.steps:
        raise ValueError("no client takes part in any round, so that there is no noisy step to audit")
    coins = torch.rand(canaries, generator=stream(seed, "canaries")) < 0.5
    if canaries < 8 or coins.all() or not coins.any():
        raise ValueError(f"expected canaries in and out, 8 or more, got {canaries}")
    found, delta = told(coins), statement.delta
    return CanaryAudit(
        lower=epsilon_bounds.gaussian(found, coins.numpy(), delta=delta, significance=significance),
        claimed=statement.epsilon,
        ceiling=epsilon_bounds.ceiling_gaussian(canaries, delta=delta, significance=significance),
        canaries=canaries,
        steps=statement.steps,
        delta=delta,
        significance=significance,
    )


@dataclass(frozen=True, kw_only=True)
class SingleStepAudit:
    """Settings by which canaries are audited: one noisy step a round, nothing after the noise, and how it is read.

    Step sizes, momentum, decay and further clipping come after the noise and cost no privacy; without them a round's
    update is the noisy gradient times a tiny step size, with which the weights as good as stay where they are.

    Attributes:
        method: of the clients.
        defense: likewise.
        clip: longest gradient of one record.
        lr: the tiny step size.
        divisor: what a sum of gradients is divided by; None is the number of records.
        blank: whether a record that is out counts as nothing; else it is not there.
    """

    method: Method
    defense: Defense
    clip: float
    lr: float
    divisor: float | None
    blank: bool


@dataclass(frozen=True, kw_only=True)
class _Drawn(FedAvg):
    """One step on images that are drawn one by one.

    Attributes:
        rate: probability of each.
    """

    rate: float

    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        """Return FedAvg's phase with a batch of images that are drawn one by one."""
        (phase,) = super().phases(task, round)
        settings = {field.name: getattr(phase, field.name) for field in fields(Phase)}
        return (PoissonPhase(**{**settings, "sampler": "poisson", "batch_size": 1}, rate=self.rate),)


def single_step_method(method: PrivateMethod, rate: float) -> SingleStepAudit:
    """Return a method's own noisy steps, each record drawn at `rate`."""
    tiny = 1e-9 / method.clip**2
    settings: dict[str, Any] = {
        **{"noise_multiplier": method.sigma, "epsilon": None, "images": None, "rate": rate, "local_steps": None},
        **{"steps": 1, "epochs": None, "head_epochs": 0, "batch_size": 1 if method.sampler == "poisson" else None},
        **{"lr": tiny, "head_lr": tiny, "momentum": 0.0, "weight_decay": 0.0, "max_norm": None},
        "rounds": 10**9,  # as many as there are steps to audit
    }
    one = replace(method, **{key: value for key, value in settings.items() if hasattr(method, key)})
    blank = one.sampler != "poisson"
    return SingleStepAudit(
        method=one, defense=Defense(), clip=one.clip, lr=tiny, divisor=one.denominator(), blank=blank
    )


def single_step_defense(defense: DPSGD, rate: float) -> SingleStepAudit:
    """Return the noisy steps of a defense, each record drawn at `rate`."""
    tiny = 1e-9 / defense.clip**2
    one = replace(defense, denominator=1.0)
    return SingleStepAudit(
        method=_Drawn(lr=tiny, steps=1, rate=rate), defense=one, clip=one.clip, lr=tiny, divisor=1.0, blank=True
    )


def noisy_releases(steps: SingleStepAudit, count: int, coins: Tensor, seed: int) -> Floats:
    """Return what every step gives away of every canary (steps, m): the noisy sum along its direction over the clip.

    Args:
        steps: one a round.
        count: how many.
        coins: (m,) which canaries are in.
        seed: of batches and noise.
    """
    parts = coins.chunk(-(-len(coins) // BLOCK))
    size = len(parts[0])
    client = Client(Task(Probe(size), (1, 1, size), 2, "head."), steps.method, steps.defense)
    every = torch.eye(size, dtype=torch.float64).view(size, 1, 1, size) * FAR * steps.clip
    blank = Batch(every[:1] * 0, torch.zeros(1, dtype=torch.int64))
    start = Federation(client, [ClientData(blank, blank)], seed)
    # whose logit is lower, so that no gradient vanishes
    labels = client.network(_parameters(start), client.task.buffers)(every).argmin(1)
    data = [ClientData(_records(Batch(every[: len(part)], labels), part, steps.blank), blank) for part in parts]
    run = Federation(client, data, seed=derive_seed(seed, "audit"), engine="loop")
    read = np.empty((count, len(coins)), dtype=np.float32 if count * len(coins) > 2**24 else np.float64)
    sign = torch.where(labels == 0, 1.0, -1.0).double()
    for step in range(count):
        seen = [canary_coordinates(done.upload.update) * sign for done in run.run_round()]
        # from the mean that is sent to the sum that gets the noise
        sums = [one[: len(part)] * (steps.divisor or len(part)) for one, part in zip(seen, parts, strict=True)]
        read[step] = torch.cat(sums).numpy() / (steps.lr * steps.clip)
    return read


def _records(every: Batch, coins: Tensor, blank_out: bool) -> Batch:
    """Return the canaries of one client; those out are left out or count as nothing, as the guarantee has it."""
    if blank_out:
        return replace(every, inputs=every.inputs * coins.view(-1, 1, 1, 1))
    kept = every.take(coins.nonzero().flatten())
    blank = Batch(torch.zeros_like(every.inputs[:1]), every.labels[:1])  # a client has one image at least
    return Batch(torch.cat([kept.inputs, blank.inputs]), torch.cat([kept.labels, blank.labels]))


class Probe(nn.Module):
    """A linear layer with an input for every canary and a classifier of two classes that changes nothing.

    Args:
        size: how many inputs.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.body = nn.utils.skip_init(nn.Linear, size, 2, bias=False, dtype=torch.float64)
        self.head = nn.utils.skip_init(nn.Linear, 2, 2, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.body.weight.zero_()
            self.head.weight.copy_(torch.eye(2))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (B, 2) of inputs (B, 1, 1, size)."""
        logits: Tensor = self.head(self.body(inputs.flatten(1)))
        return logits


def canary_coordinates(update: Tensors) -> Tensor:
    """Return an update along the canaries' directions (size,), as if all had the label 0.

    Raises:
        ValueError: nothing in the update shows the layer's gradient.
    """
    for end in ("body.weight", "body.weight.bias"):  # a hypernetwork's head gives away in its bias what it generates
        for name, value in update.items():
            if name.endswith(end):
                column = dense(value).view(2, -1)
                return (column[0] - column[1]) / -math.sqrt(2)
    raise ValueError(f"expected an update of which the layer's gradient can be read, got {', '.join(update)}")


def canary_scores(read: Floats, included: NDArray[np.bool_], signs: Floats | None = None) -> Floats:
    """Return ways to tell canaries apart (k, m): over all steps, over parts of them, by noise that was used twice.

    Args:
        read: (steps, m).
        included: (m,); of those out, every other one shows what noise alone looks like.
        signs: (steps, m) with which those included enter; None is always +.
    """
    aligned = read if signs is None else read * signs
    ways = [aligned.sum(0, dtype=np.float64)]
    if len(read) > 1:
        ways += [part.sum(0, dtype=np.float64) for part in np.array_split(aligned, min(WINDOWS, len(read)))]
    known = np.zeros(len(included), dtype=bool)
    known[::2] = True
    noise = read[:PAIRED, known & ~included].astype(np.float64)
    noise = noise - noise.mean(1, keepdims=True)
    length = np.sqrt(np.square(noise).sum(1))
    with np.errstate(invalid="ignore", divide="ignore"):
        twins = np.argwhere(np.triu(noise @ noise.T / np.outer(length, length) > ALIKE, 1))
    if len(twins):  # what two steps have in common is gone from their difference
        ways.append(sum(np.abs(read[i] - read[j]).astype(np.float64) for i, j in twins[:PAIRED]))
    return np.stack(ways)


def _parameters(run: Federation) -> Any:
    down = run.download(0)
    return run.client.method.parametrization.lift({**down.shared, **run.clients[0].private})
