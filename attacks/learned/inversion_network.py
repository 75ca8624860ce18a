"""Networks that read images off updates: the client is imitated on public images, and its updates are the lessons."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.func import vmap

from attacks.search_control import SearchMonitor
from fl.defense import overrides
from fl.gradient import func_derivative
from fl.models.building_blocks.initialization import initialize
from fl.predict import predict
from fl.runtime.digests import digest
from fl.seeds import stream
from fl.tensors import Tensors, dense
from fl.types import Batch, Candidate, frozen
from fl.view import ServerView

MAX_NUMBERS_AT_ONCE = 2**25
"""Numbers of imitated updates that are held at once."""
SCALING_UPDATES = 512
"""Imitated updates that tell how large the numbers are."""
MAX_STANDARDIZED = 10.0
"""So many standard deviations from the mean an input counts as no further."""


@dataclass(frozen=True)
class SimulatedClient:
    """The client of a view, as far as the server knows it, on images drawn from public ones.

    What the client keeps to itself is drawn anew for every update, unless the server knows where it started.

    Attributes:
        view: of known batch size and schedule; of its update nothing but names and shapes is used.
        public: images of the client's shape, with labels of its task.
    """

    view: ServerView
    public: Batch

    @cached_property
    def update_size(self) -> int:
        """How many numbers one update has."""
        return sum(value.numel() for value in self.view.update.values())

    def images(self, count: int, draw: torch.Generator) -> Batch:
        """Return `count` clients' images (count, B, C, H, W) and labels (count, B)."""
        size = self.view.batch_size or 1
        given = self.public.take(torch.randint(len(self.public), (count * size,), generator=draw))
        if self.view.threat.knows_defense and overrides(self.view.defense, "transform_batch"):
            parts = [given.take(torch.arange(i, i + size)) for i in range(0, len(given), size)]
            parts = [self.view.defense.transform_batch(part, self.view.client.task, draw) for part in parts]
            given = Batch(*(torch.cat(x) for x in zip(*((p.inputs, p.labels) for p in parts), strict=True)))
        inputs = given.inputs.to(dtype=self.view.dtype, device=self.view.device)
        labels = given.labels.to(self.view.device)
        return Batch(inputs.unflatten(0, (count, size)), labels.unflatten(0, (count, size)))

    def updates(self, images: Batch, draw: torch.Generator) -> dict[str, Tensor]:
        """Return what these clients would send, by name, one row each."""
        view, client = self.view, self.view.client

        def one(inputs: Tensor, labels: Tensor, private: dict[str, Tensor]) -> dict[str, Tensor]:
            candidate = Candidate(inputs, labels, dict(private))
            sent = predict(view, candidate, derivative=func_derivative, client=client, defended=False)
            return {name: dense(sent[name]) for name in view.update}

        private = {name: self._draw_private(name, len(images), draw) for name in view.private}
        with torch.no_grad():
            rows: dict[str, Tensor] = vmap(one)(images.inputs, images.labels, private)
            return self._apply_defense(rows, len(images), draw)

    def _draw_private(self, name: str, count: int, draw: torch.Generator) -> Tensor:
        """Draw guesses (count, *shape) of a private tensor.

        They are as layers are initialized, 0 for memory, N(0, 1) for noise.
        """
        shape, known = self.view.private[name], (self.view.private_init or {}).get(name)
        if known is not None:
            made = dense(known).expand(count, *shape)
        elif name.startswith("memory/"):
            made = torch.zeros(count, *shape)
        else:
            weight = len(shape) > 1 and not name.startswith("draws/")
            made = torch.randn(count, *shape, generator=draw) * (shape[1:].numel() ** -0.5 if weight else 1.0)
        return made.to(dtype=self.view.dtype, device=self.view.device)

    def _apply_defense(self, rows: dict[str, Tensor], count: int, draw: torch.Generator) -> dict[str, Tensor]:
        """Return the rows as a known defense sends them, with its noise."""
        defense = self.view.defense
        if not (self.view.threat.knows_defense and overrides(defense, "transform_update")):
            return rows
        sent = [defense.transform_update({n: v[i] for n, v in rows.items()}, draw) for i in range(count)]
        return {name: torch.stack([dense(update[name]) for update in sent]) for name in rows}


@dataclass(frozen=True)
class FeatureHash:
    """Updates as rows of `size` numbers, or fewer: every number, or sums of several with random signs.

    Feature hashing (Weinberger et al., ICML 2009), but the numbers are dealt out evenly. Each update is brought to
    length 1 first: what is lost is a single number, and no unit matters.

    Attributes:
        scales: factor on each tensor.
        numbers: how many an update has.
        size: longest row.
        seed: of signs and order.
    """

    scales: Mapping[str, float]
    numbers: int
    size: int
    seed: int

    def __call__(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Return rows (n, size) of updates given by name, (n, ...) each."""
        flat = torch.cat([rows[name].reshape(len(rows[name]), -1) * scale for name, scale in self.scales.items()], 1)
        flat = nn.functional.normalize(flat, dim=1)
        if self.numbers <= self.size:
            return flat
        order, signs = self._permutation_and_signs
        mixed = flat[:, order.to(flat.device)] * signs.to(flat)
        return nn.functional.pad(mixed, (0, -mixed.shape[1] % self.size)).unflatten(1, (-1, self.size)).sum(1)

    @cached_property
    def _permutation_and_signs(self) -> tuple[Tensor, Tensor]:
        draw = stream(self.seed, "hash")
        order = torch.randperm(self.numbers, generator=draw)
        return order, torch.randint(0, 2, (self.numbers,), generator=draw) * 2 - 1


@dataclass(frozen=True)
class InversionNetwork:
    """A trained network with what makes its input of an update.

    Attributes:
        hash: of an update.
        mean: of each hashed number over updates (F,).
        scale: inverse standard deviation (F,), 0 where a number is always the same.
        network: (n, F) to pixels (n, B * C * H * W).
        shape: (B, C, H, W).
        history: the loss along the training, relative to its start.
        cut_short: what ended the training before its last iteration, in words; empty where nothing did.
    """

    hash: FeatureHash
    mean: Tensor
    scale: Tensor
    network: nn.Module
    shape: tuple[int, int, int, int]
    history: tuple[float, ...]
    cut_short: str = ""

    def __call__(self, update: Tensors) -> Tensor:
        """Return the images (B, C, H, W) in [0, 1] of one update."""
        rows = self.hash({name: dense(update[name])[None] for name in self.hash.scales})
        with torch.no_grad():
            images: Tensor = self.network(standardize(rows, self.mean, self.scale))
        return images.view(self.shape).to(rows.dtype)


def standardize(rows: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Return hashed updates (n, F) as the network takes them: whatever the update's unit, the same bits.

    Args:
        rows: hashed updates (n, F).
        mean: of the training updates (F,).
        scale: one over their standard deviation (F,).
    """
    return ((rows - mean) * scale).clamp(-MAX_STANDARDIZED, MAX_STANDARDIZED).float()


def permutation_mse(found: Tensor, images: Tensor) -> Tensor:
    """Return the mean squared error of `found` (n, B, P), each client's images in the order that fits best.

    The sum of squares of both sides is the same in every order, so the best one has the largest inner products.
    """
    if images.shape[1] == 1:
        return (found - images).square().mean()
    alike = (found.detach() @ images.mT).cpu().numpy()
    order = torch.stack([torch.from_numpy(linear_sum_assignment(each, maximize=True)[1]) for each in alike])
    rows = torch.arange(len(images))[:, None]
    return (found - images[rows, order]).square().mean()


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """How a network is trained.

    Attributes:
        iterations: of Adam; its step size falls to a tenth after three quarters of them.
        batch_size: updates in each.
        width: units of the two hidden layers.
        hash_size: numbers made of an update.
        lr: step size.
        seed: of hash, initialization and lessons.
    """

    iterations: int
    batch_size: int
    width: int
    hash_size: int
    lr: float
    seed: int


def train(
    imitation: SimulatedClient, settings: TrainingSettings, monitor: SearchMonitor | None = None
) -> InversionNetwork:
    """Return a network that inverts the updates of an imitated client; no update is ever seen twice.

    Args:
        imitation: of the client.
        settings: of the training.
        monitor: of the caller; may end the training, which is then noted in the network.
    """
    iterations, batch, seed = settings.iterations, settings.batch_size, settings.seed
    monitor = monitor or SearchMonitor()
    view = imitation.view
    shape = (view.batch_size or 1, *view.task.input_shape)
    draw = stream(seed, "trial")
    trial = imitation.updates(
        imitation.images(min(SCALING_UPDATES, max(2, MAX_NUMBERS_AT_ONCE // imitation.update_size)), draw), draw
    )
    scales = {name: _inverse(rows.double().square().mean().sqrt()) for name, rows in trial.items()}
    made = FeatureHash(scales, imitation.update_size, settings.hash_size, seed)
    lessons = _training_batches(imitation, made, batch, seed)
    rows = torch.cat([made(trial), *(lessons()[0] for _ in range(-(-SCALING_UPDATES // batch)))]).double()
    mean, spread = rows.mean(0), rows.std(0)
    scale = torch.where(spread > 0, 1 / spread, 0.0)
    mean, scale = mean.to(view.dtype), scale.to(view.dtype)
    network = _network(rows.shape[1], settings.width, torch.Size(shape).numel(), seed).to(view.device)
    optimizer = torch.optim.Adam(network.parameters(), lr=settings.lr)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3 * iterations // 4])
    losses, cut_short = [], ""
    for step in range(iterations):
        if step and (reason := monitor.after(step)):
            cut_short = f"the training of the network was cut short by {reason} after {step} of {iterations} iterations"
            break
        rows, images = lessons()
        optimizer.zero_grad()
        loss = permutation_mse(network(standardize(rows, mean, scale)).view(images.shape), images)
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % max(1, iterations // 20) == 0:
            losses.append(float(loss.detach()))
    history = tuple(value / losses[0] for value in losses)
    return InversionNetwork(made, mean, scale, network.requires_grad_(False), shape, history, cut_short)


def _training_batches(
    imitation: SimulatedClient, made: FeatureHash, batch: int, seed: int
) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a function that imitates `batch` clients anew.

    It returns hashed updates (batch, F) and pixels (batch, B, P) in float32.
    """
    draw = stream(seed, "lessons")
    room = max(1, min(batch, MAX_NUMBERS_AT_ONCE // imitation.update_size))

    def lesson() -> tuple[Tensor, Tensor]:
        hashes, pixels = [], []
        for start in range(0, batch, room):
            images = imitation.images(min(room, batch - start), draw)
            hashes.append(made(imitation.updates(images, draw)))
            pixels.append(images.inputs.flatten(2).float())
        return torch.cat(hashes), torch.cat(pixels)

    return lesson


def _network(inputs: int, width: int, outputs: int, seed: int) -> nn.Module:
    with torch.device("meta"):
        hidden = [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        network = nn.Sequential(*hidden, nn.Linear(width, outputs), nn.Sigmoid())
    network.to_empty(device="cpu")
    initialize(network, stream(seed, "start"))
    return network


def _inverse(size: Tensor) -> float:
    return 1 / float(size) if size > 0 else 0.0


def client_key(view: ServerView) -> str:
    """Return a key that is equal for views whose clients are imitated alike, whatever they sent."""
    settings = (view.method, view.defense, view.threat, view.schedule, view.batch_size, view.round)
    shapes = ([(n, v.shape) for n, v in view.update.items()], list(view.private.items()), view.dtype, view.device)
    task = (str(view.task.model), view.task.num_classes, view.task.input_shape)
    held = (view.shared, view.buffers, view.received, view.private_init, view.draws, view.order)
    network = (view.task.parameters, frozen(view.task.model), view.task.buffers)
    return digest(repr((settings, shapes, task)), held, network)
