"""HyperFL's local training without its matrices: exact, and many times faster than multiplying them out.

All clients of a round start from the server's head matrices W0 (P x H, all heads on top of each other), and every
gradient of them is an outer product g h^T. SGD is linear in gradients and weights, so after j steps

    W = a_0 W0 + sum_i a_i g_i h_i^T,

and the coefficients a follow from SGD itself, run on a vector: the gradient of step i is a multiple of the i-th unit
vector, and momentum and decay act on a as they do on W. A step then needs h W0^T and g W0, for all clients in one
matrix product each, and thin products with the factors; no client holds a matrix, a momentum or a gradient of P x H.
The heads' biases are one more column of W, of a hidden unit that is always 1. Columns of units that are silent in all
clients take part in neither product, and where few units of a client speak, few outer products stand for its steps'.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fl.client import Client, LocalResult, LossGradient
from fl.defense import overrides
from fl.engines.factored.heads import Heads
from fl.engines.factored.merging import merge_outer_products
from fl.engines.sequential import Engine
from fl.gradient import autograd_derivative
from fl.local.optimizers import OptimState, clip_gradients, optimize
from fl.method import Method, Step
from fl.models.hypernetworks.hyperfl_hypernetwork import (
    EMBEDDING,
    TRUNK_BIAS,
    TRUNK_WEIGHT,
    Hypernetwork,
    head_bias,
    head_weight,
)
from fl.simulation.client_round import PreparedRound, Round, finish, train
from fl.simulation.federation_state import FederationState
from fl.tensors import LowRank, Tensors, Term, Value, add_scaled, dense
from fl.types import Batch, Group, Phase

MATRIX, COEFFICIENTS = "hypernet.heads", "hypernet.heads.coefficients"
MERGE_PERIOD = 8
"""Steps between two attempts to merge outer products."""


def obstacle(client: Client) -> str | None:
    """Return why the clients of a federation can't be trained by factors, or None."""
    method, made = client.method, client.method.parametrization
    if type(made) is not Hypernetwork:  # a subclass may generate or pull back in another way
        return "its weights are not made by HyperFL's hypernetwork"
    if type(method).gradient is not Method.gradient or type(method).finish is not Method.finish:
        return "it has a gradient or payloads of its own"
    if overrides(client.defense, "gradient"):
        return f"the defense {client.defense.name} changes single gradients"
    return None


class Factored(Engine):
    """All clients of a round in step with each other; falls back to the loop where a round does not allow it."""

    name = "factored"
    chunk = 5
    """So many clients are trained at once, and hold up to all their steps' factors. Ten are hardly faster, and take up
    to a tenth more memory."""

    def train(self, run: FederationState, numbers: Sequence[int], *, evaluate: bool = False) -> Iterator[Round]:
        """Train as `Engine.train`, equal to it up to rounding; `chunk` clients at a time."""
        for i in range(0, len(numbers), self.chunk):
            yield from self._train_chunk(run, numbers[i : i + self.chunk], evaluate)

    def _train_chunk(self, run: FederationState, numbers: Sequence[int], evaluate: bool) -> list[Round]:
        starts = [run.start(number) for number in numbers]
        fits = _is_expressible(run.client, starts)
        rounds = _train_by_factors(run.client, starts) if fits else [train(start) for start in starts]
        return [run.with_accuracy(done) if evaluate else done for done in rounds]


def _train_by_factors(client: Client, starts: Sequence[PreparedRound]) -> list[Round]:
    heads = Heads(client, starts[0].download.shared)
    trainees = [_Trainee(start, heads) for start in starts]
    with torch.no_grad():
        for p, phase in enumerate(starts[0].phases):
            _run_phase(heads, trainees, p, phase)
    return [finish(trainee.start, trainee.result()) for trainee in trainees]


def _is_expressible(client: Client, starts: Sequence[PreparedRound]) -> bool:
    """Return whether this round's phases and downloads are of the kind that factors can express."""
    first = starts[0].download.shared
    if any(s.download.received or any(s.download.shared[k] is not v for k, v in first.items()) for s in starts):
        return False
    names = [name for name in first if name.startswith("hypernet.")] + [COEFFICIENTS]
    counts = [0] * len(starts)
    for p, phase in enumerate(starts[0].phases):
        moving = phase.assign(dict.fromkeys(names))
        groups = {id(group) for group in moving.values()}
        together = len(groups) == 1 and len(moving) == len(names)
        if phase.optimizer != "sgd" or phase.batches_per_step != 1 or (groups and not together):
            return False
        if groups:
            counts = [n + len(start.trace.order[p]) for n, start in zip(counts, starts, strict=True)]
    # the factors of all steps are kept, here for several clients at once: no more of them than the two matrices have
    # numbers that they stand for, weights and momentum
    return max(counts) <= 2 * dense(first[TRUNK_BIAS]).numel()


@dataclass
class _Trainee:
    """One client in training.

    Attributes:
        start: what entered.
        heads: the server's.
        params: all that moves and stays, the heads' matrices as coefficients (1 + J,).
        left: g of every step (J, P), until they are merged.
        right: h of every step (J, H), or (J, 1 + H) with the 1 that the biases belong to, likewise.
        count: outer products so far.
        due: at how many of them to look for fewer.
    """

    start: PreparedRound
    heads: Heads
    params: Tensors = field(init=False)
    left: Tensor = field(init=False)
    right: Tensor = field(init=False)
    count: int = 0
    due: int = MERGE_PERIOD

    def __post_init__(self) -> None:
        start, heads = self.start, self.heads
        trace = start.trace
        self.images = Batch(trace.inputs, trace.labels)
        self.buffers = {k: v.clone() for k, v in start.buffers.items()}
        steps = sum(len(phase) for phase in trace.order)
        self.left, self.right = (heads.like.new_empty(0, size) for size in heads.shape)
        coefficients = torch.zeros(1 + steps, dtype=torch.float64, device=heads.like.device)
        coefficients[0] = 1.0
        given = {**start.download.shared, **start.state.private}
        self.params = {k: v for k, v in given.items() if not k.startswith("hypernet.heads.")}
        self.params[COEFFICIENTS] = coefficients
        task, method = start.client.task, start.client.method
        lifted = method.parametrization.lift(given)
        self.step = Step(task, lifted, start.download.received, start.state.memory, {}, start.key.round)

    def begin(self, phase: Phase) -> None:
        """Start a phase."""
        groups = phase.assign(self.params)
        plain = {id(g): replace(g, max_norm=None) for g in groups.values()}  # clipped before, by the true norms
        self.phase, self.groups, self.optim = phase, groups, OptimState()
        self.unclipped: dict[str, Group] = {name: plain[id(g)] for name, g in groups.items()}
        if COEFFICIENTS in groups and not len(self.left):
            pairs = zip(self.start.phases, self.start.trace.order, strict=True)
            room = sum(len(steps) for phase, steps in pairs if COEFFICIENTS in phase.assign(self.params))
            self.left, self.right = (x.new_empty(room, x.shape[1]) for x in (self.left, self.right))

    def hidden(self) -> _Hidden:
        """Return the hidden layer."""
        z = self.heads.made.preactivation(self.params)
        h = torch.relu(z)
        return _Hidden(z, torch.cat([h.new_ones(1), h]) if self.heads.made.bias else h)

    def base_share(self) -> Tensor:
        """Return how much is left of the server's heads, a scalar."""
        return self._used_coefficients(self.right)[0]

    def weights(self, base: Tensor, h: Tensor) -> dict[str, Tensor]:
        """Return the network's weights, from what the server's heads make of `h` (P,), as far as they are left."""
        past = self._used_coefficients(h)[1:] * (self.right[: self.count] @ h)
        made = self.heads.split(torch.addmv(base, self.left[: self.count].mT, past))
        own = {name: dense(self.params[name]) for name in self.heads.task.parameters if name not in made}
        return {**made, **own}

    def gradient(self, p: int, s: int, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradient of the loss at step `s` of phase `p`, with respect to the network's weights."""
        client, batch = self.start.client, self.images.take(self.start.trace.order[p][s][0])
        step = replace(self.step, draws=self.start.trace.draws[p][s])
        raw = LossGradient(client, step, tuple(self.groups), self.buffers, client.task.model, None, autograd_derivative)
        if not len(batch):  # Poisson sampling may draw no image
            wanted = client.method.parametrization.sources(client.task, raw.live)
            return {name: torch.zeros_like(weights[name]) for name in wanted}
        return raw.of_weights(weights, batch)

    def move(self, grads: Tensors) -> None:
        """One step of the optimizer; `grads` holds the heads' as an outer product under `MATRIX`."""
        groups = {**self.groups, **({MATRIX: self.groups[COEFFICIENTS]} if MATRIX in grads else {})}
        grads = clip_gradients(grads, groups)
        if MATRIX in grads:
            product = grads.pop(MATRIX)
            assert isinstance(product, LowRank)
            (term,) = product.terms
            self.left[self.count], self.right[self.count] = term.left[0], term.right[0]
            self.count += 1
            unit = torch.zeros_like(dense(self.params[COEFFICIENTS]))
            unit[self.count] = term.coef
            grads[COEFFICIENTS] = unit
        self.params, self.optim = optimize(self.phase, self.unclipped, self.params, grads, self.optim)
        if self.count >= self.due:
            self._merge(self.params, self.optim.first)
            self.due = self.count + MERGE_PERIOD

    def _merge(self, *linear: Tensors) -> None:
        """Put fewer outer products in the place of those so far, where the sums that `linear` weighs are unchanged."""
        holders = [values for values in linear if COEFFICIENTS in values]
        numbers = [dense(values[COEFFICIENTS]) for values in holders]
        weights = torch.stack([x[1 : self.count + 1] for x in numbers])
        found = merge_outer_products(self.left[: self.count], self.right[: self.count], weights)
        if found is None:
            return
        end = found.first + len(found.left)
        self.left[found.first : end], self.right[found.first : end] = found.left, found.right
        for values, before, after in zip(holders, numbers, found.weights, strict=True):
            number = torch.zeros_like(before)
            number[: 1 + found.first], number[1 + found.first : 1 + end] = before[: 1 + found.first], after
            values[COEFFICIENTS] = number
        self.count = end

    def overlaps(self, g: Tensor) -> Tensor:
        """Return the inner products of `g` (P,) with the gradients of all steps so far (J,)."""
        return self.left[: self.count] @ g

    def pull_back(
        self, grads: dict[str, Tensor], g: Tensor, overlaps: Tensor, base: Tensor, hidden: _Hidden
    ) -> Tensors:
        """Return the gradients of what moves.

        Args:
            grads: those of the network's weights.
            g: all generated ones of them (P,).
            overlaps: as of `overlaps(g)`.
            base: `W0^T g` (H,), or (1 + H,) with the biases' first.
            hidden: the hidden layer.
        """
        a = self._used_coefficients(base)
        back = base * a[0] + (overlaps * a[1:]) @ self.right[: self.count]
        back = back[-len(hidden.z) :] * (hidden.z > 0)
        found: Tensors = {
            TRUNK_WEIGHT: back[:, None] * dense(self.params[EMBEDDING]),
            TRUNK_BIAS: back,
            EMBEDDING: dense(self.params[TRUNK_WEIGHT]).mT @ back,
        }
        result = {name: found[name] if name in found else grads[name] for name in self.groups if name != COEFFICIENTS}
        if COEFFICIENTS in self.groups:
            result[MATRIX] = LowRank.outer(g, hidden.h)
        return result

    def result(self) -> LocalResult:
        """Return the differences and private tensors, as `local_update` returns them."""
        shared, private = self.start.download.shared, self.start.state.private
        self._merge(self.params)  # momentum is gone: the products that only it needed are, too
        whole = self.left[: self.count] if self.count == len(self.left) else self.left[: self.count].clone()
        a, update = dense(self.params[COEFFICIENTS]), dict[str, Value]()
        scale, right = 1.0 - float(a[0]), self.right[: self.count] * -self._used_coefficients(self.right)[1:, None]
        kept = scale if abs(scale) > 1e-13 else 0.0
        biased = int(self.heads.made.bias)
        for name, part in self.heads.slices.items():
            base, left = dense(shared[head_weight(name)]), whole[:, part]
            terms, size = (Term(1.0, left, right[:, biased:]),), (base.shape[0], base.shape[1])
            update[head_weight(name)] = LowRank(base if kept else None, kept, terms, size)
            if biased:
                update[head_bias(name)] = kept * dense(shared[head_bias(name)]) + left.mT @ right[:, 0]
        rest = {name: value for name, value in shared.items() if name not in update}
        update.update(add_scaled(rest, self.params, -1.0))
        return LocalResult(
            update={name: update[name] for name in shared},
            extra={},
            private={name: self.params[name] for name in private},
            memory=self.start.state.memory,
            buffers=self.buffers,
        )

    def _used_coefficients(self, like: Tensor) -> Tensor:
        """Return the coefficients in use (1 + count,), in the type of `like`."""
        return dense(self.params[COEFFICIENTS])[: self.count + 1].to(like.dtype)


def _run_phase(heads: Heads, trainees: Sequence[_Trainee], p: int, phase: Phase) -> None:
    for trainee in trainees:
        trainee.begin(phase)
    if all(name in heads.task.parameters for name in trainees[0].groups):  # generated weights rest: make them once
        for trainee, (hidden, base) in zip(trainees, _generate(heads, trainees), strict=True):
            made = trainee.weights(base, hidden.h)
            for s in range(len(trainee.start.trace.order[p])):
                own = {name: dense(trainee.params[name]) for name in trainee.groups}
                trainee.move(dict(trainee.gradient(p, s, {**made, **own})))
        return
    for s in range(max(len(trainee.start.trace.order[p]) for trainee in trainees)):
        _step(heads, [trainee for trainee in trainees if s < len(trainee.start.trace.order[p])], p, s)


def _step(heads: Heads, trainees: Sequence[_Trainee], p: int, s: int) -> None:
    made = _generate(heads, trainees)
    joined = heads.like.new_empty(len(trainees), heads.shape[0])
    found = []
    for trainee, (hidden, base), g in zip(trainees, made, joined, strict=True):
        grads = trainee.gradient(p, s, trainee.weights(base, hidden.h))
        heads.join(grads, g)
        found.append((grads, g, trainee.overlaps(g)))  # at once, while the factors are in the cache
    products = heads.backward(joined)
    for trainee, (hidden, _), (grads, g, overlaps), product in zip(trainees, made, found, products, strict=True):
        trainee.move(trainee.pull_back(grads, g, overlaps, product, hidden))


class _Hidden(NamedTuple):
    """A client's hidden layer: pre-activations (H,), and activations (H,), or (1 + H,) with the biases' 1 first."""

    z: Tensor
    h: Tensor


def _generate(heads: Heads, trainees: Sequence[_Trainee]) -> list[tuple[_Hidden, Tensor]]:
    """Return every client's hidden layer, and what is left of the server's heads makes of it.

    A product for all at once.
    """
    hidden = [trainee.hidden() for trainee in trainees]
    heads.attend(torch.stack([own.h for own in hidden]))
    scaled = torch.stack([trainee.base_share() * own.h for trainee, own in zip(trainees, hidden, strict=True)])
    return list(zip(hidden, heads.forward(scaled), strict=True))
