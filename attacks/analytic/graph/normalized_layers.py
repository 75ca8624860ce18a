r"""Solves for what layers take whose outputs are normalized over each image, as by group and layer normalization.

A layer makes z = W * x of its input x, and a normalization N makes y = N(z) of that. What flows back into y is known,
q. What flows back into z is

    u(z) = J_N(z)^T q,        J_N the Jacobian of N,

which hangs on z, and so on the unknown x. But it does so little: means over many numbers. With u known the layer's
gradient is linear in x. So x follows from u, z from x, and u from z, over and over. It begins with u averaged over z of
noise, and converges within a few turns.

**The size of x is open.** N(c z) = N(z) but for the small number that N adds to variances. So u(c z) = u(z) / c, and if
x explains the gradient, c x does. Below, what flows back into x is

    s = r + u / c    pulled back through the layer,

r what comes by other ways, such as a shortcut. The next bias below tells c: its gradient is a sum of what flows back.

**With a bias in the layer**, z = W * x + b, the wrong size of x gives the wrong x, and only its product with u hangs
little on it. The bias's own gradient is the sum of u / c, which tells c nearly. At that size turns are taken again,
until c is 1. Where each channel is normalized by itself, that sum is zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacks.analytic.graph.image_factors import solve_robustly
from attacks.analytic.graph.layer_solves import (
    NEARLY_OPEN,
    NO_GRADIENT,
    KnownSignal,
    SolvedInput,
    count_shortfall,
    error_by_gradients,
    open_above,
    solve_input,
)
from attacks.analytic.graph.network_graph import NetworkGraph
from attacks.analytic.graph.propagation import Propagation, UnknownError
from attacks.analytic.graph.unsent_entries import AndersonAcceleration
from attacks.network.operation_trace import Ref
from attacks.search_control import check_time_limit
from fl.seeds import stream
from fl.tensors import per_image

LARGE, SCALE_FREE = 1e4, 1e-6
"""Size of the noise by which it is told whether an operation is free of scale, and what may change with the scale."""
MIN_CHANGE = 1e-3
"""Share of its output by which a normalization changes, at least, with each number as a share of it. An activation that
has saturated does not change."""
DRAWS, TURNS, REMEMBERED, SETTLED = 8, 80, 20, 1e-8
"""Draws of noise that a beginning is averaged over, turns at most, how many of the last ones are extrapolated from, and
the change of an input after which none follows, relative to it."""
MIN_FALL, PATIENCE = 0.9, 12
"""The share to which the misfit must fall, and turns without that at the end."""
SIZE_ROUNDS, SIZE_SETTLED = 8, 1e-5
"""Times that turns are taken and the size is found, at most, and by how much it changes at the end. What a
normalization adds to variances hangs on the size, and all that it returns does if a bias comes before it."""
MIN_ROUND_FALL, ROUND_PATIENCE = 0.5, 2
"""The share to which the misfit must fall from one of these times to the next, and times without that at the end."""
MIN_OPEN = 1e-5
"""Share of the largest output of an activation above which it counts as open until sizes are known."""
MAX_ERROR, MAX_INPUT_MISFIT = 2e-2, 1e-3
"""Share of itself by which an input may be off, and share of its layers' gradients that it may leave, for its size to
be what is not known. Of a wrong input biases contradict every size."""
NO_SIZE = "its output is normalized, and no bias below tells the size of what it takes"
CONTRADICTED_SIZE = "its output is normalized, and no size of what it takes explains the biases' gradients"
"""Why an input is not known that explains its layers' gradients."""
NO_INPUT = "its output is normalized, and no input was found that explains its gradient: {:.1e} of it is left"
"""Why an input is not known that does not."""
MAX_SIZE_MISFIT = 1e-2
"""Share of biases' gradients, as far as these hang on the size, that may stay unexplained."""
MIN_SUM = 1e-5
"""Size of a bias's gradient, relative to what it sums, below which that cancels, as behind instance normalization."""


@dataclass(frozen=True)
class NormalizedLayer:
    """A weighted layer whose output a normalization alone takes, as it is or arranged otherwise.

    Attributes:
        number: of the layer's operation.
        path: numbers of the operations from its output on, the normalization's last.
        signal: q, what flows back into what the normalization returns.
    """

    number: int
    path: tuple[int, ...]
    signal: Tensor

    def pull_back(self, network: NetworkGraph, output: Tensor) -> Tensor:
        """Return u, what flows back into the layer's output, if that is `output`."""
        taken = [(Ref(self.number), output)]
        for operation in self.path[:-1]:
            ref, value = taken[-1]
            taken.append((Ref(operation), network.run(operation, {ref: value})))
        signal = self.signal
        for operation, (ref, value) in zip(reversed(self.path), reversed(taken), strict=True):
            signal = network.pull_back(operation, signal, ref, {ref: value})
        return signal


@dataclass(frozen=True)
class NormalizedInput:
    """What layers take, and what flows back into their outputs.

    Attributes:
        solved: the input.
        signals: of the layers.
    """

    solved: SolvedInput
    signals: list[KnownSignal]

    def resize(self, sizes: Tensor) -> NormalizedInput:
        """Return the input of each image so many times as large (B,), with the signals that go with it."""
        return NormalizedInput(
            replace(self.solved, values=self.solved.values * per_image(sizes, self.solved.values)),
            [replace(known, signal=known.signal / per_image(sizes, known.signal)) for known in self.signals],
        )


def find_normalized_layers(known: Propagation, users: Sequence[int]) -> list[NormalizedLayer] | None:
    """Return layers with the normalizations of their outputs; None if one has none, or its signal is not known."""
    network, found = known.network, []
    for number in users:
        path = path_to_normalization(network, number)
        if path is None or network.layers[number].groups != 1:
            return None
        try:
            found.append(NormalizedLayer(number, path, known.signal(Ref(path[-1]))))
        except UnknownError:
            return None
    return found or None


def path_to_normalization(network: NetworkGraph, number: int) -> tuple[int, ...] | None:
    """Return the operations that alone take a layer's output, a normalization last and affine ones before it, or None.

    Affine ones are permutations, say, as around a normalization of channels that stand last.
    """
    path: list[int] = []
    while (taker := _sole_taker(network, number)) is not None:
        flows, number = {Ref(number)}, taker
        path.append(number)
        if is_normalization(network, number):
            return tuple(path)
        if number in network.layers or not network.is_affine(number) or set(network.flows_into(number)) != flows:
            return None
    return None


def _sole_taker(network: NetworkGraph, number: int) -> int | None:
    """Return the operation that alone takes what another one makes, or None; further outputs, as of split, count."""
    taken = [(ref, user) for ref, users in network.consumers.items() if ref.node == number for user in users]
    return taken[0][1] if len(taken) == 1 and taken[0][0] == Ref(number) else None


def is_normalization(network: NetworkGraph, number: int) -> bool:
    """Return whether an operation returns the same whatever the size of what it takes."""
    flows = network.flows_into(number)
    if len(flows) != 1 or number in network.layers or network.is_affine(number):
        return False
    like = network.graph.value(flows[0])
    if not like.is_floating_point() or network.graph.value(Ref(number)).shape != like.shape:
        return False
    noise, signal = LARGE * _noise(like, 0), _noise(like, 1)
    once, twice = (network.run(number, {flows[0]: factor * noise}) for factor in (1.0, 2.0))
    if not bool((once - twice).norm() <= SCALE_FREE * once.norm()):
        return False
    change = noise * network.pull_back(number, signal, flows[0], {flows[0]: noise})
    return bool(change.norm() > MIN_CHANGE * (signal * once).norm())


def solve_normalized_input(known: Propagation, ref: Ref, layers: Sequence[NormalizedLayer]) -> NormalizedInput | str:
    """Return what layers take, at its size, or why it is not known.

    Args:
        known: values and signals.
        ref: the tensor.
        layers: that take it.

    Raises:
        StoppedError: the time limit has passed.
    """
    network = known.network
    if not any(bool(network.layers[layer.number].gradient.any()) for layer in layers):
        return NO_GRADIENT
    signals = [_begin(network, layer) for layer in layers]
    if short := count_shortfall(_as_known(network, layers, signals)):
        return short
    least, since, before = math.inf, 0, None
    for left in reversed(range(SIZE_ROUNDS)):
        found = _take_turns(network, ref, layers, signals)
        if found is None:
            break
        since = 0 if found.solved.misfit < MIN_ROUND_FALL * least else since + 1
        least = min(least, found.solved.misfit)
        equations = [*_size_equations(known, ref, layers, found)]
        sizes = _solve_for_sizes(equations, math.inf)
        is_last = not left or since == ROUND_PATIENCE or _is_settled(sizes, before)
        sizes = _solve_for_sizes(equations, MAX_SIZE_MISFIT) if is_last else sizes
        if isinstance(sizes, str):
            return _doubt_input(found, has_biases=bool(equations)) or sizes
        found, before = found.resize(sizes), sizes
        if is_last:
            return found
        signals = _signals_by(network, ref, layers, found.solved.values)
    return "its equations leave inputs open"


def _doubt_input(found: NormalizedInput, *, has_biases: bool) -> str:
    """Return why an input is wrong of which no size was found, or nothing.

    Without biases to tell the size, an input may explain its gradient at no other size than its own.
    """
    off, misfit = error_by_gradients(found.signals, found.solved), found.solved.misfit
    if off > MAX_ERROR:
        return NEARLY_OPEN.format(off)
    return NO_INPUT.format(misfit) if has_biases and misfit > MAX_INPUT_MISFIT else ""


def _is_settled(sizes: Tensor | str, before: Tensor | None) -> bool:
    """Return whether sizes are 1, or as those of the round before."""
    return not isinstance(sizes, str) and any(
        bool((sizes - usual).abs().max() <= SIZE_SETTLED) for usual in (1.0, before) if usual is not None
    )


def _as_known(network: NetworkGraph, layers: Sequence[NormalizedLayer], signals: Sequence[Tensor]) -> list[KnownSignal]:
    equations = [network.layers[layer.number] for layer in layers]
    return [KnownSignal(e, u.reshape(e.output_shape)) for e, u in zip(equations, signals, strict=True)]


def _signals_by(network: NetworkGraph, ref: Ref, layers: Sequence[NormalizedLayer], values: Tensor) -> list[Tensor]:
    """Return u of layers that take these values."""
    given = {ref: values.reshape(network.graph.value(ref).shape)}
    return [layer.pull_back(network, network.run(layer.number, given)) for layer in layers]


def _begin(network: NetworkGraph, layer: NormalizedLayer) -> Tensor:
    """Return the mean of what flows back into a layer's output over outputs of noise."""
    like = network.graph.value(Ref(layer.number))
    draws = [layer.pull_back(network, _noise(like, draw)) for draw in range(DRAWS)]
    return torch.stack(draws).mean(0)


def _take_turns(
    network: NetworkGraph, ref: Ref, layers: Sequence[NormalizedLayer], signals: Sequence[Tensor]
) -> NormalizedInput | None:
    """Return where turns end that solve for the input and for the signals; None if an input is left open.

    Args:
        network: the graph.
        ref: the input.
        layers: that take it.
        signals: u of each, to begin with.
    """
    accelerated, at = AndersonAcceleration(REMEMBERED), None
    norms: Tensor | None = None
    least, since, best = math.inf, 0, None
    for _ in range(TURNS):
        check_time_limit()
        known = _as_known(network, layers, signals)
        solved = solve_input(known)
        if solved is None:
            return best
        now = solved.values.flatten(1).norm(dim=1)
        norms = now if norms is None else norms  # turns leave the sizes open
        found = NormalizedInput(solved, known).resize(norms / now)
        made = found.solved.values
        since = 0 if solved.misfit < MIN_FALL * least else since + 1
        best, least = (found, solved.misfit) if solved.misfit < least else (best, least)
        if since == PATIENCE or (at is not None and bool((made - at).norm() <= SETTLED * norms.norm())):
            break
        at = made if at is None else accelerated.extrapolate(at, made)
        signals = _signals_by(network, ref, layers, at)
    return best


def _solve_for_sizes(equations: Sequence[tuple[Tensor, Tensor]], tolerance: float) -> Tensor | str:
    """Return by what each image's input must be multiplied (B,), as biases tell, or why they do not.

    Args:
        equations: of `_size_equations`.
        tolerance: share of the biases' gradients that sizes may leave.
    """
    if not any(bool(made.any()) for made, _ in equations):
        return NO_SIZE
    made, wanted = (torch.cat(side) for side in zip(*equations, strict=True))
    found = solve_robustly(made, wanted, tolerance)  # a wrong bit spoils its channel's equation
    return 1 / found if found is not None and bool((found > 0).all()) else CONTRADICTED_SIZE


def _size_equations(
    known: Propagation, ref: Ref, layers: Sequence[NormalizedLayer], found: NormalizedInput
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield A (n, B) and b (n,): A / c = b for the c (B,) that an input must be multiplied by.

    They are of biases below the input, and of those that are added to the layers' outputs.
    """
    network, images = known.network, len(found.solved.values)
    yield from _own_biases(network, layers, found)
    shares = torch.eye(images, dtype=found.solved.values.dtype, device=found.solved.values.device)
    without, *each = (_trial(known, ref, layers, found, share) for share in (torch.zeros_like(shares[0]), *shares))
    for number in network.used:
        if number > ref.node:
            return
        for parameter, name in network.bias_like_parameters(number):
            try:
                rest, *made = (
                    network.pull_back(number, trial.signal(Ref(number)), parameter).flatten()
                    for trial in (without, *each)
                )
            except UnknownError:
                continue
            if name not in network.sent:
                yield torch.stack([one - rest for one in made], 1), network.gradient[name].flatten() - rest


def _own_biases(
    network: NetworkGraph, layers: Sequence[NormalizedLayer], found: NormalizedInput
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the equations of biases that are added to the layers' outputs, where what these sum does not cancel."""
    for layer, known in zip(layers, found.signals, strict=True):
        signal = known.signal.reshape(network.graph.value(Ref(layer.number)).shape)
        each = torch.eye(len(signal), dtype=signal.dtype, device=signal.device)
        for parameter, name in network.bias_like_parameters(layer.number):
            parts = [signal * per_image(one, signal) for one in each]
            made, summed = (
                torch.stack([network.pull_back(layer.number, part, parameter).flatten() for part in some], 1)
                for some in (parts, [part.abs() for part in parts])
            )
            if name not in network.sent and bool((made.norm(dim=0) > MIN_SUM * summed.norm(dim=0)).all()):
                yield made, network.gradient[name].flatten()


def _trial(
    known: Propagation, ref: Ref, layers: Sequence[NormalizedLayer], found: NormalizedInput, share: Tensor
) -> Propagation:
    """Return what is known if such a share of each image's signals (B,) flows back into the layers' outputs."""
    network = known.network
    values = found.solved.values.reshape(network.graph.value(ref).shape)
    trial = known.snapshot()  # but for signals below that a bias gave by itself, of whatever size the input is
    trial.signals = {at: signal for at, signal in trial.signals.items() if at.node > ref.node}
    for layer, signal in zip(layers, found.signals, strict=True):
        out, u = Ref(layer.number), signal.signal
        trial.set_signal(out, (u * per_image(share, u)).reshape(network.graph.value(out).shape))
    if ref.node in network.activations:
        trial.set_mask(ref.node, values > _threshold(network.activations[ref.node].slope, values))
    return trial


def _threshold(slope: float, values: Tensor) -> float:
    """Return above which number an activation of this slope below zero counts as open, of a size not yet known."""
    return max(open_above(values), MIN_OPEN * float(values.max())) if slope == 0 else 0.0


def _noise(like: Tensor, draw: int) -> Tensor:
    return torch.randn(like.shape, generator=stream(draw, "normalized"), dtype=like.dtype).to(like.device)
