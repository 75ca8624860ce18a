"""Finds by what each image's signal must be multiplied, as shifts of a gradient give it up to a factor.

A bias whose gradient was sent sums the signals of all images. With u_b the signal of image b as it was found
and f_b the factor,

    sum_b f_b P u_b = d    for every such bias above the layer,

where P takes the signal to the bias and d is what was sent: linear equations for f. Biases behind the layer itself are
asked first, such as those of batch normalization. Where there is none, the next bias above its activation is, such as
the classifier's. All between may be affine, as pooling and a linear layer are. Then what flows back into the output to
which that bias is added, e_b, follows from

    J^T e_b = u_b          at what the activation let through,

J the map from the activation's output to that output of one image, and the bias has sum_b f_b P e_b = d.

Biases below the layer are asked where none above can be, as where its output goes into a concatenation: once its input
is solved for, what flows back into these follows up to the same factor.

Images of one label may send nearly the same into all biases, and frozen parameters have no gradient. Then two tensors
that were solved for tell, one below the other. With signals too small by f_b, both came out too large by f_b: y_b above
and A_b + t of the one below, A_b what is proportional to it and t the shifts on the way, such as those of batch
normalization,

    y_b = A_b + f_b t      wherever the activation that returned y_b was open.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from attacks.analytic.graph.network_graph import NetworkGraph
from attacks.analytic.graph.propagation import Propagation, UnknownError
from attacks.network.autograd_support import pull_back_or_zeros
from attacks.network.operation_trace import Ref

MAX_MISFIT = 2e-2
"""Share of the sent gradients that factors may leave."""
MAX_SIGNAL_MISFIT = 1e-3
"""Share of a signal that what flows back into the next bias may leave."""
REWEIGHTINGS = 12
"""Rounds of least squares in which an equation counts less the larger its residual."""
LEAST_MISS = 1e-6
"""Residual, relative to the largest signal, that counts as none."""
MAX_WRONG = 0.1
"""Share of signals that may be wrong, because a channel's level was misread, say."""
MAX_OUTPUTS = 4096
"""Numbers of one image to which the next bias is added, at most."""
MAX_CONDITION = 100.0
"""Largest condition of the next bias's equations: images of one label send nearly the same into a classifier."""

MIN_OPEN = 1e-4
"""Share of the largest output of an activation above which it was open for certain."""
MIN_SHIFT = 1e-3
"""Share of outputs that shifts must make, at least, to tell factors."""
MAX_SHIFT_MISFIT = 1e-2
"""Share of the shifts that factors may leave."""


def find_image_factors(network: NetworkGraph, number: int, signal: Tensor) -> Tensor | None:
    """Return the factors (B,), or None where no bias tells them.

    Args:
        network: the graph.
        number: of the layer.
        signal: at its output, of each image up to a factor.
    """
    ref = Ref(number)
    signal = signal.reshape(network.graph.value(ref).shape)
    behind = [*_biases_behind(network, ref, signal)]
    equations = behind or [*_next_biases(network, ref, signal)]
    if not equations:
        return None
    made, sent = _join(equations)
    if not behind and float(torch.linalg.cond(made)) > MAX_CONDITION:
        return None
    return _solve_for_factors(made, sent)


def _solve_for_factors(made: Tensor, sent: Tensor) -> Tensor | None:
    """Return the factors that most equations (n, B) and (n,) agree on, none of them zero; None where they do not."""
    factors = solve_robustly(made, sent, MAX_MISFIT) if len(sent) >= made.shape[1] else None
    return factors if factors is not None and bool((factors != 0).all()) else None


def _join(equations: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return equations (n, B) and (n,) of several biases as one system."""
    made, sent = zip(*equations, strict=True)
    return torch.cat(made), torch.cat(sent)


def _biases_behind(network: NetworkGraph, ref: Ref, signal: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the equations (n, B) and (n,) of biases that are added to a layer's output, up to its activation."""
    while True:
        yield from _bias_equations(network, ref.node, signal)
        above = network.sole_scaling(ref)
        if above is None:
            return
        ref, signal = Ref(above[0]), signal / above[1]


def _next_biases(network: NetworkGraph, ref: Ref, signal: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield likewise the equations of the first biases above the activation of a layer's output."""
    gate = network.gate(ref)
    if gate is None:
        return
    activation, slope = Ref(gate[0]), gate[1]
    end, path = _path_to_next_bias(network, activation)
    if end is None or network.graph.value(end)[0].numel() > MAX_OUTPUTS:
        return
    u = (signal / slope).flatten(1)
    back = _pull_back_each(network, path, activation, end)  # J^T
    e = torch.zeros_like(network.graph.value(end), dtype=u.dtype).flatten(1)
    for image, heard in enumerate(u != 0):
        if int(heard.sum()) <= back.shape[1]:
            return
        found = solve_robustly(back[heard], u[image, heard], MAX_SIGNAL_MISFIT)
        if found is None:
            return
        e[image] = found
    yield from _bias_equations(network, end.node, e.reshape(network.graph.value(end).shape))


def solve_robustly(matrix: Tensor, right: Tensor, tolerance: float) -> Tensor | None:
    """Return the least squares solution of equations, a few wrong ones left out; None if most do not agree.

    Args:
        matrix: (n, m).
        right: (n,).
        tolerance: share of the right sides that most equations may leave.
    """
    if not bool(right.any()):
        return None  # no share of nothing
    weights = torch.ones_like(right)
    for _ in range(REWEIGHTINGS):
        solution = torch.linalg.lstsq(matrix * weights[:, None], (right * weights)[:, None]).solution[:, 0]
        left = (matrix @ solution - right).abs()
        weights = 1 / (left + LEAST_MISS * right.abs().max()).sqrt()
    best = left.argsort()[: math.ceil((1 - MAX_WRONG) * len(left))]
    return solution if float(left[best].norm()) <= tolerance * float(right[best].norm()) else None


def _path_to_next_bias(network: NetworkGraph, start: Ref) -> tuple[Ref | None, list[int]]:
    """Return the first tensor to which a bias is added, where only affine operations lead there, and these."""
    ref, path = start, list[int]()
    while len(users := network.consumers.get(ref, [])) == 1 and network.is_affine(users[0]):
        if set(network.flows_into(users[0])) != {ref}:
            return None, path
        ref = Ref(users[0])
        path.append(users[0])
        if network.bias_like_parameters(users[0]):
            return ref, path
    return None, path


def _pull_back_each(network: NetworkGraph, path: list[int], start: Ref, end: Ref) -> Tensor:
    """Return what each number of one image at the end sends back to the start (numbers there, numbers at the end)."""
    with torch.enable_grad():
        point = torch.zeros_like(network.graph.value(start)).requires_grad_()
        made = network.graph.replay(path, end, {start: point})[0].flatten()
        each = [pull_back_or_zeros([number], point, [torch.ones_like(number)])[0].flatten() for number in made]
    return torch.stack(each, 1)


def _bias_equations(network: NetworkGraph, number: int, signal: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for parameter, name in network.bias_like_parameters(number):
        parts = []
        for image in range(len(signal)):
            one = torch.zeros_like(signal)
            one[image] = signal[image]
            parts.append(network.pull_back(number, one, parameter).flatten())
        made, sent = torch.stack(parts, 1), network.gradient[name].flatten()
        known = network.sent.get(name)
        yield (made, sent) if known is None else (made[known.flatten()], sent[known.flatten()])


def find_factors_by_biases(known: Propagation) -> Tensor | None:
    """Return the factors (B,) that biases tell whose signal is known from what was solved for; None where they do not.

    Args:
        known: values and signals, of each image up to a factor.
    """
    equations: list[tuple[Tensor, Tensor]] = []
    for number in known.network.used:
        if known.network.bias_like_parameters(number):
            try:
                signal = known.signal(Ref(number))
            except UnknownError:
                continue
            equations += _bias_equations(known.network, number, signal)
    if not equations:
        return None
    made, sent = _join(equations)
    if len(sent) <= made.shape[1] or float(torch.linalg.cond(made)) > MAX_CONDITION:
        return None
    return _solve_for_factors(made, sent)


def find_factors_by_shifts(known: Propagation) -> Tensor | None:
    """Return by what signals must be multiplied, and values divided, as shifts between solved tensors tell (B,).

    Args:
        known: values and signals, of each image up to a factor.

    Returns:
        The factors, or None where no solved tensors are tied by shifts that are large enough.
    """
    twice, thrice = (Propagation(known.network, {ref: n * v for ref, v in known.values.items()}) for n in (2, 3))
    for number, activation in known.network.activations.items():
        if activation.slope != 0 or (solved := known.values.get(Ref(number))) is None:
            continue
        before = known.network.flows_into(number)[0]
        try:
            once, double, triple = (each.value(before).flatten(1) for each in (known, twice, thrice))
        except UnknownError:
            continue
        proportional, shift = double - once, 2 * once - double
        straight = 3 * proportional + shift
        if not torch.allclose(triple, straight, rtol=1e-9, atol=1e-9 * float(straight.abs().max())):
            continue  # an activation on the way that was not solved for
        y = solved.flatten(1)
        is_open = y > MIN_OPEN * y.abs().amax(1, keepdim=True)
        shift, left = shift * is_open, (y - proportional) * is_open
        factors = (shift * left).sum(1) / shift.square().sum(1).clamp_min(1e-300)
        made = factors[:, None] * shift
        large = (factors > 0) & (made.norm(dim=1) > MIN_SHIFT * (y * is_open).norm(dim=1))
        fits = (left - made).norm(dim=1) < MAX_SHIFT_MISFIT * made.norm(dim=1)
        if bool((large & fits).all()):
            return factors
    return None
