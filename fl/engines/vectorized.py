"""Clients of a round trained stacked: one call of `torch.func.vmap` is a step of all whose batches have one shape.

Clients go in step with each other. At every step of a phase those that feed batches of equal shapes form a stack, which
lasts as long as its members feed alike; a short last batch of some makes a stack of its own. A step is the local rule's
own: nothing is said of a method here but what `vmap` asks, fixed shapes and no decision that depends on numbers. Many
small networks then keep a GPU busy, where one after the other would not; on a CPU there is little to gain.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import grad as func_grad
from torch.func import vmap
from torch.utils import _pytree as pytree

from fl.client import Client, DefendedGradient, LocalResult, LossGradient
from fl.engines.sequential import Engine
from fl.local.hook_results import expect_direction
from fl.local.optimizers import OptimState, optimize
from fl.method import Step
from fl.parametrization import Parametrization
from fl.privacy.gaussian_noise import Noise, UntransformedDraw
from fl.simulation.client_round import PreparedRound, Round, finish, train
from fl.simulation.federation_state import FederationState
from fl.tensors import Tensors, add_scaled
from fl.types import Batch, Phase

log = logging.getLogger(__name__)
State = dict[str, Any]
"""What a step changes: "params" that move, the optimizer's "first" and "second" moments, the model's "buffers"."""
VMAP_ERRORS = (AttributeError, RuntimeError, TypeError)
"""What comes of a rule that `vmap` can't take, or that draws from `_StackedNoise` as if it were a generator."""


def obstacle(client: Client) -> str | None:
    """Return why the clients of a federation can't be stacked, as far as is known before they train, or None."""
    if type(client.method.parametrization).lift is not Parametrization.lift:
        return "its parameters are structured: matrices over a common base are not stacked"
    return None


class Vectorized(Engine):
    """Clients stacked, `chunk` at a time; equal to the loop up to rounding, running statistics included.

    Noise that a defense adds to single gradients is stacked where it is drawn by `fl.privacy.dp_sgd`: each client's
    comes from its own generator, in the loop's order. A defense that draws from the generator itself, and whatever else
    `vmap` refuses, sends the chunk through the loop; the log says why, once. A private gradient holds that of every
    image of every client of a stack: a smaller `chunk` needs less memory.
    """

    name = "vmap"
    chunk = 20

    def __init__(self) -> None:
        self.has_logged_fallback = False

    def train(self, run: FederationState, numbers: Sequence[int], *, evaluate: bool = False) -> Iterator[Round]:
        """Train as `Engine.train`, equal to it up to rounding; `chunk` clients at a time."""
        for i in range(0, len(numbers), self.chunk):
            yield from self._train_chunk(run, numbers[i : i + self.chunk], evaluate)

    def _train_chunk(self, run: FederationState, numbers: Sequence[int], evaluate: bool) -> Iterable[Round]:
        rounds: Iterable[Round] | None = None
        try:
            rounds = _train_stacked([run.start(number) for number in numbers])
        except VMAP_ERRORS as error:
            if not self.has_logged_fallback:
                why = f"{type(error).__name__}: {error}".splitlines()[0]
                log.info("%s is trained by the loop engine: %s", run.client.method.name, why)
                self.has_logged_fallback = True
        if rounds is None:  # prepared anew, as generators have moved on, and with what the attempt held given back
            rounds = (train(run.start(number)) for number in numbers)
        return (run.with_accuracy(done) if evaluate else done for done in rounds)


def _train_stacked(starts: Sequence[PreparedRound]) -> list[Round]:
    trainees = [_Trainee(start) for start in starts]
    with torch.no_grad():
        for p, phase in enumerate(starts[0].phases):
            _run_phase(trainees, p, phase)
    return [finish(trainee.start, trainee.result()) for trainee in trainees]


def _run_phase(trainees: Sequence[_Trainee], p: int, phase: Phase) -> None:
    for trainee in trainees:
        trainee.begin(phase)
    for s in range(max(len(trainee.start.trace.order[p]) for trainee in trainees)):
        alike: dict[Hashable, list[_Trainee]] = {}
        for trainee in trainees:
            if s < len(trainee.start.trace.order[p]):
                trainee.feed(p, s)
                alike.setdefault((_signature(trainee.fed), trainee.kind), []).append(trainee)
        for members in alike.values():
            _stack_of(members, phase).advance(s)
    for trainee in trainees:
        trainee.end(phase)


# ---- one client ------------------------------------------------------------------------------------------------------
@dataclass(eq=False)
class _Trainee:
    """One client in training.

    Attributes:
        start: what entered.
        params: all of them, as of the phase's beginning.
        buffers: of the model, likewise.
        base: what every step may look at, but its draws.
        count: steps so far.
        state: what a step changes.
        rest: what stands still for a phase: all "params" that don't move, what the network is "fixed" to where they
            are the generator's, and what the round began with.
        kind: equal for clients that can be stacked.
        fed: batches and draws of the present step.
        stack: which has the newest state, if one has.
    """

    start: PreparedRound
    params: Tensors = field(init=False)
    buffers: dict[str, Tensor] = field(init=False)
    base: Step = field(init=False)
    count: int = 0
    state: State = field(init=False)
    rest: dict[str, Any] = field(init=False)
    kind: Hashable = None
    fed: tuple[Any, ...] = ()
    stack: _Stack | None = None

    def __post_init__(self) -> None:
        start = self.start
        self.params = {**start.download.shared, **start.state.private}
        self.buffers = start.buffers
        task, received, memory = start.client.task, start.download.received, start.state.memory
        self.base = Step(task, self.params, received, memory, {}, start.key.round)

    def begin(self, phase: Phase) -> None:
        """Start a phase."""
        client, groups = self.start.client, phase.assign(self.params)
        moving = {name: self.params[name] for name in groups}
        fixed = None
        if all(name in client.task.parameters for name in groups):  # what is generated stays as it is: generate it once
            made = client.method.parametrization.network(self.params, client.task)
            fixed = {name: value for name, value in made.items() if name not in groups}
        self.state = {"params": moving, "first": {}, "second": {}, "buffers": {**self.buffers}}
        self.rest = {
            "params": {name: value for name, value in self.params.items() if name not in groups},
            "fixed": fixed,
            "start": self.base.start,
            "received": self.base.received,
            "memory": self.base.memory,
            "recorded": self.base.recorded,
        }
        self.kind = _signature(self.rest)

    def feed(self, p: int, s: int) -> None:
        """Take up the images of step `s` of phase `p`."""
        trace = self.start.trace
        batches = [(trace.inputs[index], trace.labels[index]) for index in trace.order[p][s]]
        self.fed = batches, trace.draws[p][s]
        self.count += self.start.phases[p].records_direction_as is None

    def end(self, phase: Phase) -> None:
        """End a phase."""
        if self.stack is not None:
            self.stack.dissolve()
        if phase.records_direction_as is not None:
            self.base = replace(
                self.base, recorded={**self.base.recorded, phase.records_direction_as: self.state["recorded"]}
            )
        self.params = {name: self.state["params"].get(name, value) for name, value in self.params.items()}
        self.buffers = self.state["buffers"]

    def result(self) -> LocalResult:
        """Return the result as `local_update` does."""
        start, params = self.start, self.params
        extra, memory = start.client.method.finish(params, self.base, self.count)
        return LocalResult(
            update=add_scaled({name: self.base.start[name] for name in start.download.shared}, params, -1.0),
            extra=extra,
            private={name: params[name] for name in start.state.private},
            memory=memory,
            buffers=self.buffers,
        )


# ---- several of them -------------------------------------------------------------------------------------------------
def _stack_of(members: Sequence[_Trainee], phase: Phase) -> _Stack:
    """Return the stack of these clients: the one they are in, if it holds no others, else a new one."""
    stack = members[0].stack
    if stack is not None and stack.members == members:
        return stack
    for trainee in members:
        if trainee.stack is not None:
            trainee.stack.dissolve()
    return _Stack(members, phase)


class _Stack:
    """Clients whose steps are taken together: row i of every tensor is that of client i."""

    def __init__(self, members: Sequence[_Trainee], phase: Phase) -> None:
        self.members, self.phase = members, phase
        self.state: State = pytree.tree_map(_stack_tensors, *(trainee.state for trainee in members))
        flat = [pytree.tree_flatten(trainee.rest) for trainee in members]
        self.tree = flat[0][1]
        columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
        self.varying = [any(leaf is not column[0] for leaf in column) for column in columns]
        # what is the same tensor for all is kept once: a network at rest then works on one large batch
        self.rest = [torch.stack(c) if v else c[0] for c, v in zip(columns, self.varying, strict=True)]
        self.streams = tuple(trainee.start.noise for trainee in members)
        for trainee in members:
            trainee.stack = self

    def advance(self, s: int) -> None:
        """Step `s` of the phase, on what the members have been fed."""
        fed = pytree.tree_map(lambda *parts: torch.stack(parts), *(trainee.fed for trainee in self.members))
        dims = [0 if varies else None for varies in self.varying]
        step = vmap(partial(self._step, s), in_dims=(0, 0, dims, 0))
        self.state = step(torch.arange(len(self.members)), self.state, self.rest, fed)

    def dissolve(self) -> None:
        """Give every member its state back."""
        for i, trainee in enumerate(self.members):
            trainee.state = pytree.tree_map(lambda rows, i=i: rows[i].clone(), self.state)
            trainee.stack = None

    def _step(self, s: int, row: Tensor, state: State, leaves: list[Any], fed: tuple[Any, ...]) -> State:
        """Take one client's step, as in `local_update`."""
        client, round = self.members[0].start.client, self.members[0].start.key.round
        rest, (batches, draws), buffers = pytree.tree_unflatten(leaves, self.tree), fed, dict(state["buffers"])
        held = (rest["start"], rest["received"], rest["memory"], draws, round, rest["recorded"])
        step = Step(client.task, *held, self.phase)
        params = {name: (state["params"] if name in state["params"] else rest["params"])[name] for name in step.start}
        groups, derivative = self.phase.assign(params), partial(_buffered_derivative, buffers)
        raw = LossGradient(client, step, tuple(groups), buffers, client.task.model, rest["fixed"], derivative)
        defended = DefendedGradient(raw, client.defense, _StackedNoise(row, streams=self.streams), False)  # type: ignore[arg-type]
        found = client.method.gradient(defended, params, [Batch(*batch) for batch in batches], step)  # type: ignore[arg-type]
        looks = self.phase.records_direction_as is not None
        grads = expect_direction(client.rule_name, found, None if looks else params)
        if looks:
            return {**state, "recorded": grads}
        optim = OptimState(s, state["first"], state["second"])
        params, optim = optimize(self.phase, groups, params, grads, optim)
        moved = {name: params[name] for name in groups}
        return {"params": moved, "first": optim.first, "second": optim.second, "buffers": buffers}


def _stack_tensors(*parts: Tensor) -> Tensor:
    """Stack tensors; the same one is not copied."""
    same = all(part is parts[0] for part in parts)
    return parts[0].expand(len(parts), *parts[0].shape) if same else torch.stack(parts)


def _signature(tree: object) -> Hashable:
    """Return a key that is equal for trees of one structure, with tensors of the same shapes and types."""
    leaves, structure = pytree.tree_flatten(tree)
    return str(structure), tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves)


def _buffered_derivative(
    buffers: dict[str, Tensor], loss: Callable[[dict[str, Tensor]], Tensor], values: dict[str, Tensor]
) -> dict[str, Tensor]:
    """`fl.client.func_derivative` for a model that writes to `buffers`, which hold what it left there afterwards.

    Nothing that comes from outside may be written to inside of a derivative, so the model is given copies.
    """

    def keeping(chosen: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        before = dict(buffers)
        buffers.update({name: value.clone() for name, value in before.items()})
        value, after = loss(chosen), dict(buffers)
        buffers.update(before)
        return value, after

    grads, after = func_grad(keeping, has_aux=True)(values)
    buffers.update(after)
    return grads


# ---- their noise -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _StackedNoise(Noise):
    """Noise from each client's own generator; the key () is the client's row in the stack."""

    streams: tuple[torch.Generator, ...] = ()

    def like(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Draw it as `fl.privacy.dp_sgd` does from one generator."""
        sizes = {name: (tuple(value.shape), value.dtype) for name, value in values.items()}
        drawn = {name: _StackedDraw.apply(self.key, *size, self.streams) for name, size in sizes.items()}
        return {name: value.to(values[name].device) for name, value in drawn.items()}


class _StackedDraw(UntransformedDraw):
    """A stack of rows gives a stack of draws."""

    @staticmethod
    def forward(row: Tensor, shape: tuple[int, ...], kind: torch.dtype, streams: Sequence[torch.Generator]) -> Tensor:
        return torch.randn(shape, generator=streams[int(row)], dtype=kind)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], rows: Tensor, *rest: Any) -> tuple[Tensor, int]:
        return torch.stack([_StackedDraw.apply(row, *rest) for row in rows]), 0
