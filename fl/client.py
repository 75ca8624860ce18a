"""The one local-training rule: run on real data by the simulator, differentiated through by the attacker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from fl.defense import Defense
from fl.gradient import DEFENSE_DRAWS, Derivative, Gradient, autograd_derivative, draws_for_buffers, func_derivative
from fl.local.hook_results import expect_direction, expect_network, expect_scope
from fl.local.optimizers import OptimState, optimize
from fl.losses.returned_value import expect_number
from fl.method import Method
from fl.network import Network
from fl.runtime.module_copies import deep_copy
from fl.runtime.random_state import draws_masks
from fl.tensors import Payloads, Tensors, add_scaled, dense, flatten, sub, zeros
from fl.types import Batch, Draws, Order, Phase, Scope, Step, Task

Batches = Sequence[Iterable[Sequence[Batch]]]
SINGLE_VALUE = "more than 1 value per channel"
"""What batch norm in train mode says of a batch in which a channel has one value."""
SINGLE_VALUE_ADVICE = (
    "expected 2 images or more in each step, got {count}: batch norm in train mode takes the variance of a channel "
    "over the images of a step. Set train_mode: false in the method, take 2 images or more for each step (batch_size "
    "of the method, where an epoch may leave one image over, and observe.batch_size), or group norm"
)


@dataclass(frozen=True, eq=False)
class Client:
    """A task, a method and a defense together: everything a local rule needs but the data.

    Attributes:
        base: the task as given.
        method: the federated method.
        defense: the client's defense.
        task: the task with the network the method and the defense make of it.

    Raises:
        ValueError: if the model draws random numbers that no one could replay (dropout in train mode).
    """

    base: Task
    method: Method
    defense: Defense = field(default_factory=Defense)
    task: Task = field(init=False)

    def __post_init__(self) -> None:
        made = self.defense.wrap_model(self.method.client_model(self.base))
        model = expect_network(self.defense.name, made)
        object.__setattr__(self, "task", replace(self.base, model=model.train(self.method.train_mode)))
        self.defense.check(self.method, self.task)
        drops = [name for name, module in model.named_modules() if module.training and draws_masks(module)]
        if self.method.train_mode and drops:
            raise ValueError(
                f"expected a model without dropout in train mode, got {drops}: its masks are drawn from the global "
                f"generator and can't be replayed; set train_mode=False in the method"
            )

    @property
    def rule_name(self) -> str:
        """The names of what makes a step: the method's, and the defense's where there is one."""
        method = getattr(self.method, "name", type(self.method).__name__)  # of a class that is not registered
        return method if type(self.defense) is Defense else f"{method} with {self.defense.name}"

    @cached_property
    def fixed_statistics_model(self) -> nn.Module:
        """The network, whose running statistics stay as they are; outputs in train mode do not use them.

        It is a copy where it has such statistics and is in train mode.
        """

        def moving(model: nn.Module) -> list[nn.modules.batchnorm._NormBase]:
            norms = (module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase))
            return [norm for norm in norms if norm.training]

        if not moving(self.task.model):
            return self.task.model
        model = deep_copy(self.task.model)
        for norm in moving(model):
            norm.track_running_stats = False
        return model

    @cached_property
    def in_evaluation_mode(self) -> Client:
        """The client with its network in evaluation mode, itself where it trains in that."""
        if not self.method.train_mode:
            return self
        return Client(self.base, replace(self.method, train_mode=False), self.defense)

    def network_in(self, dtype: torch.dtype, device: torch.device | str | None = None) -> nn.Module:
        """Return a copy of `fixed_statistics_model` in another precision, as `Task.convert` makes it."""
        hooks = type(self.method).client_model, type(self.defense).wrap_model
        own = hooks != (Method.client_model, Defense.wrap_model) or self.base.model.training != self.method.train_mode
        task = self.task if own else self.base  # which many views have in common: it is tried but once
        return task.convert(self.fixed_statistics_model, device=device, dtype=dtype)

    @cached_property
    def stackable(self) -> nn.Module:
        """The network in a form for `vmap`: batch norm in train mode applies its weight and bias as steps of their own.

        In one step with them, the gradient of its gradient is wrong under `vmap` (seen with torch 2.15).
        """

        def concerned(module: nn.Module) -> bool:
            return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training and module.affine

        if not any(map(concerned, self.fixed_statistics_model.modules())):
            return self.fixed_statistics_model
        model = deep_copy(self.fixed_statistics_model)
        for module in filter(concerned, model.modules()):
            module.forward = partial(_normalize_separately, module)  # type: ignore[arg-type]
        return model

    def scopes(self, names: Mapping[str, object]) -> dict[str, Scope]:
        """Return who holds each of `names`.

        Raises:
            TypeError: the method says other than a `Scope` of one.
        """
        scope, task, rule = self.method.scope, self.task, self.rule_name
        return {name: expect_scope(rule, name, scope(name, task)) for name in names}

    @property
    def draws(self) -> bool:
        """Whether a step may take random numbers."""
        return type(self.method).draw is not Method.draw or type(self.defense).draw is not Defense.draw

    def draw(self, batch: Batch, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Return the random numbers of a step on `batch`.

        The method's, and those of the defense under `defense/buffer`.
        """
        own = self.defense.draw(batch, self.task, generator)
        return {**self.method.draw(batch, self.task, generator), **{DEFENSE_DRAWS + name: x for name, x in own.items()}}

    def network(self, params: Tensors, buffers: dict[str, Tensor]) -> Network:
        """Return the client's network with the weights that `params` stand for; what it writes into buffers is lost."""
        weights = self.method.parametrization.network(params, self.task)
        return Network(self.fixed_statistics_model, weights, buffers, writes=False)


def _normalize_separately(norm: nn.modules.batchnorm._BatchNorm, inputs: Tensor) -> Tensor:
    normalized = functional.batch_norm(inputs, None, None, training=True, eps=norm.eps)
    shape = (-1, *[1] * (inputs.ndim - 2))
    return normalized * norm.weight.view(shape) + norm.bias.view(shape)


@dataclass(frozen=True)
class LossGradient(Gradient):
    """The gradient of a client's own loss.

    Attributes:
        client: whose.
        step: what the step may look at.
        live: names of the parameters that move.
        buffers: of the network.
        model: the network, whose weights are handed to it.
        fixed: the network's weights where what generates them does not move; None where it does.
        derivative: how gradients are taken.
        loss: in place of the method's, where a defense changes it.
    """

    client: Client
    step: Step
    live: tuple[str, ...]
    buffers: dict[str, Tensor]
    model: nn.Module
    fixed: dict[str, Tensor] | None
    derivative: Derivative
    loss: Callable[[Network, Batch, Step], Tensor] | None = None

    def __call__(self, params: Tensors, batch: Batch) -> Tensors:
        """Return the gradient by the names of the parameters that move."""
        if not len(batch):  # Poisson sampling may draw no image; the mean loss of none is no number
            return zeros(params, self.live)
        return self.pull(params, self.of_weights(self.weights(params), batch, self.derivative))

    def value(self, params: Tensors, batch: Batch) -> Tensor:
        """Return the loss itself, which no defense touches; running statistics stay as they are."""
        network = self.network(self.weights(params))
        network = replace(network, buffers={name: value.clone() for name, value in network.buffers.items()})
        return (self.loss or self.client.method.loss)(network, batch, self.step)

    def check_per_sample(self) -> None:
        """Refuse a loss or a model that couples the samples of a batch.

        Raises:
            ValueError: says what couples them.
        """
        if not self.client.method.has_per_sample_loss:
            raise ValueError(f"{self.client.method.name}: its loss couples the samples of a batch; can't clip each")
        norms = [m for m in self.model.modules() if isinstance(m, nn.modules.batchnorm._NormBase) and m.training]
        if norms:
            raise ValueError(
                "expected a model that treats samples apart, got batch norm in train mode: use group norm, or "
                "train_mode=False"
            )

    def weights(self, params: Tensors) -> dict[str, Tensor]:
        """Return the network's weights that `params` stand for; generated once per phase where they do not move."""
        if self.fixed is None:
            return self.client.method.parametrization.network(params, self.client.task)
        return {**self.fixed, **{name: dense(params[name]) for name in self.live}}

    def of_weights(
        self, weights: dict[str, Tensor], batch: Batch, derivative: Derivative = autograd_derivative
    ) -> dict[str, Tensor]:
        """Gradients of the loss with respect to those of the network's weights that the moving parameters need."""
        client = self.client
        wanted = client.method.parametrization.sources(client.task, self.live)

        def loss(chosen: dict[str, Tensor]) -> Tensor:
            try:
                value = (self.loss or client.method.loss)(self.network({**weights, **chosen}), batch, self.step)
            except ValueError as error:
                if SINGLE_VALUE not in str(error):
                    raise
                raise ValueError(SINGLE_VALUE_ADVICE.format(count=len(batch))) from error
            return expect_number(f"{client.rule_name}: loss()", value)

        return derivative(loss, {name: weights[name] for name in wanted})

    def network(self, weights: dict[str, Tensor]) -> Network:
        """Return the network with these weights, and what was drawn for this step in the buffers it is meant for."""
        return Network(self.model, weights, {**self.buffers, **draws_for_buffers(self.model, self.step.draws)})

    def pull(self, params: Tensors, grads: dict[str, Tensor]) -> Tensors:
        """Return the gradients of the parameters that move from those of the network's weights."""
        return self.client.method.parametrization.pull_back(params, grads, self.client.task, self.live)


def client_loss_gradient(grad: Gradient) -> LossGradient:
    """Return the gradient with the client whose loss it is of.

    Raises:
        TypeError: it is of no client.
    """
    if not isinstance(grad, LossGradient):
        raise TypeError(f"expected the gradient of a client's loss, got {type(grad).__name__}")
    return grad


@dataclass(frozen=True)
class LocalResult:
    """What local training leaves behind.

    Attributes:
        update: `shared before - shared after`, by name.
        extra: further payloads to send.
        private: private parameters after training.
        memory: what the client keeps for its next round.
        buffers: the model's buffers after training.
    """

    update: Tensors
    extra: Payloads
    private: Tensors
    memory: Payloads
    buffers: dict[str, Tensor]

    def trained(self, shared: Tensors) -> Tensors:
        """Return the shared parameters after training, from those before."""
        return {name: sub(value, self.update[name]) for name, value in shared.items()}

    def sent(self) -> Tensors:
        """Return everything sent as one set: the update, and further payloads under `payload/name`."""
        return {**self.update, **flatten(self.extra)}


@dataclass(frozen=True, kw_only=True)
class LocalInput:
    """All that enters a client's local training beside its images.

    Attributes:
        shared: parameters that the server sent, by name.
        private: the client's own parameters, by name.
        buffers: of the model, all of them.
        received: further payloads from the server.
        memory: what the client's method remembers of earlier rounds.
        round: number of the round, from 0.
    """

    shared: Tensors
    private: Tensors = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    received: Payloads = field(default_factory=dict)
    memory: Payloads = field(default_factory=dict)
    round: int = 0


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """How the local rule is run: for real by the simulator, as a prediction by the attacker.

    Attributes:
        phases: of the training; None takes those of the method in this round.
        draws: the method's random numbers, phase -> step -> by name; None takes the method's guess.
        guessed_draws: random numbers by (phase, step) and name that go before those of `draws`.
        generator: for the defense's noise; None leaves the noise out.
        derivative: how gradients are taken.
        track_statistics: whether running statistics are updated, as in the simulator.
        use_search_gradient: whether the defense's gradient for searches stands for its own.
    """

    phases: Sequence[Phase] | None = None
    draws: Draws | None = None
    guessed_draws: Mapping[tuple[int, int], dict[str, Tensor]] = field(default_factory=dict)
    generator: torch.Generator | None = None
    derivative: Derivative = autograd_derivative
    track_statistics: bool = False
    use_search_gradient: bool = False


def local_update(
    client: Client, start: LocalInput, batches: Batches, training: LocalTraining | None = None
) -> LocalResult:
    """Train on `batches` by the client's local rule: pure, and differentiable in everything that enters.

    Args:
        client: whose rule to follow.
        start: what training starts from.
        batches: phase -> step -> the batches of the step.
        training: how the rule is run; by default with the method's guess of random numbers and without noise.

    Returns:
        Differences, private state and buffers after training; nothing that came in is changed.
    """
    training = training or LocalTraining()
    method = client.method
    params = lifted = method.parametrization.lift({**start.shared, **start.private})
    buffers = {k: v.clone() for k, v in start.buffers.items()}  # spectral norm writes to its own, tracked or not
    course = _Course(client, buffers, training)
    base = Step(client.task, lifted, start.received, start.memory, {}, start.round)
    count = 0
    phases = method.phases(client.task, start.round) if training.phases is None else training.phases
    for number, (phase, steps) in enumerate(zip(phases, batches, strict=True)):
        params, base, taken = course.through(number, phase, params, base, steps)
        count += taken
    extra, memory = method.finish(params, base, count)
    return LocalResult(
        update=add_scaled({k: lifted[k] for k in start.shared}, params, -1.0),
        extra=extra,
        private={k: params[k] for k in start.private},
        memory=memory,
        buffers=buffers,
    )


@dataclass(frozen=True)
class _Course:
    """A round's local training: what does not change from phase to phase."""

    client: Client
    buffers: dict[str, Tensor]
    training: LocalTraining

    def through(
        self, number: int, phase: Phase, params: Tensors, base: Step, steps: Iterable[Sequence[Batch]]
    ) -> tuple[Tensors, Step, int]:
        """Return parameters, what steps may look at, and how many moved anything, after the phase of this number."""
        groups, state, taken = phase.assign(params), OptimState(), 0
        fixed = self._fixed(groups, params)
        for i, batches in enumerate(steps):
            step = replace(base, draws=self._drawn(number, i, batches), phase=phase)
            grads = self._direction(params, tuple(groups), batches, step, fixed)
            if phase.records_direction_as is not None:
                base = replace(base, recorded={**base.recorded, phase.records_direction_as: grads})
                continue
            params, state = optimize(phase, groups, params, grads, state)
            taken += 1
        return params, base, taken

    def _fixed(self, moving: Iterable[str], params: Tensors) -> dict[str, Tensor] | None:
        """Return the network's weights where only its own move.

        What is generated stays as it is, so it is generated once.
        """
        client = self.client
        still = all(name in client.task.parameters for name in moving)
        return client.method.parametrization.network(params, client.task) if still else None

    def _drawn(self, phase: int, step: int, batches: Sequence[Batch]) -> dict[str, Tensor]:
        """Return the random numbers of a step."""
        drawn = self.client.draw(batches[0], None) if self.training.draws is None else self.training.draws[phase][step]
        return {**drawn, **self.training.guessed_draws.get((phase, step), {})}

    def _direction(
        self,
        params: Tensors,
        moving: tuple[str, ...],
        batches: Sequence[Batch],
        step: Step,
        fixed: dict[str, Tensor] | None,
    ) -> Tensors:
        """Return the method's direction for a step, along gradients as the defense hands them over."""
        client, training = self.client, self.training
        looks = step.phase is not None and step.phase.records_direction_as is not None
        still = client.stackable if training.derivative is func_derivative else client.fixed_statistics_model
        # a look leaves running statistics alone
        model = client.task.model if training.track_statistics and not looks else still
        raw = LossGradient(client, step, moving, self.buffers, model, fixed, training.derivative)
        defended = DefendedGradient(raw, client.defense, training.generator, training.use_search_gradient)
        found = client.method.gradient(defended, params, batches, step)  # type: ignore[arg-type]
        return expect_direction(client.rule_name, found, None if looks else params)


@dataclass(frozen=True)
class DefendedGradient:
    """A gradient as the defense hands it to the method.

    Attributes:
        raw: the gradient of the client's own loss.
        defense: of the client.
        generator: for the defense's noise; None leaves the noise out.
        use_search_gradient: whether the defense's gradient for searches stands for its own.
    """

    raw: LossGradient
    defense: Defense
    generator: torch.Generator | None
    use_search_gradient: bool

    def __call__(self, params: Tensors, batch: Batch) -> Tensors:
        """Return the gradient by the names of the parameters that move."""
        if self.use_search_gradient:
            return self.defense.search_gradient(self.raw, params, batch)
        return self.defense.gradient(self.raw, params, batch, self.generator)

    def value(self, params: Tensors, batch: Batch) -> Tensor:
        """Return the loss, as `Gradient.value` does."""
        return self.raw.value(params, batch)


def gather_batches(inputs: Tensor, labels: Tensor, order: Order) -> Batches:
    """Return the batches of `order`, phase -> step -> batch; a step's are taken when it comes, and once."""
    whole = Batch(inputs, labels)
    return [([whole.take(index) for index in step] for step in steps) for steps in order]
