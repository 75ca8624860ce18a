"""Solves a network's layers again from the classifier's signal, with the activation masks that a first descent found.

A descent that begins with the shifts of a convolution's gradient carries their error down: noise grows from one
position to the next, and by the condition of what flows back. Once the masks are known that beginning is not needed.
The first descent's features tell the classifier's input, and with it what flows back into the classifier: of one image
that is its bias gradient itself, rounded as single numbers are. All signals below follow from that one and the masks,
as precisely.
"""

from __future__ import annotations

import math

from torch import Tensor

from attacks.analytic.graph.layer_solves import solve_signal
from attacks.analytic.graph.propagation import Propagation, UnknownError
from attacks.analytic.graph.solver import MAX_MISFIT, GraphSolver
from attacks.network.operation_trace import IMAGE, Ref

TRIED = 3
"""Tensors of the first descent, the highest ones, down to which a second one has to explain more to go on."""
MIN_MISFIT = 3e-6
"""Misfit of the worst tensor of a first descent above which there is a second one: float32's rounding leaves less."""


def descend_again(first: GraphSolver) -> GraphSolver:
    """Return a more precise solution of the same layers, or the first where there is none.

    Args:
        first: a descent that has ended.

    Raises:
        StoppedError: the time limit has passed.
    """
    network = first.network
    worst = max((tensor.misfit for tensor in first.solved), default=0.0)
    if worst < MIN_MISFIT or not first.anchor or not first.scaled or _crossed_pooling(first):
        return first
    top = max(network.layers)
    signal = _find_top_signal(first, top)
    if signal is None:
        return first
    masks = _known_masks(first)

    def descend(lowest: int) -> GraphSolver:
        known = Propagation(network, masks=dict(masks))
        known.set_signal(Ref(top), signal)
        solver = GraphSolver(network, first.images, known, scaled=True)
        solver.run(lowest)
        return solver

    if not _is_more_precise(descend(first.solved[:TRIED][-1].ref.node), first):
        return first  # what the update itself rounds is as imprecise everywhere
    second = descend(IMAGE)
    if _lowest(second) > _lowest(first) or not _is_more_precise(second, first):
        return first
    second.anchor = first.anchor
    return second


def _crossed_pooling(solver: GraphSolver) -> bool:
    """Return whether tensors below a max pooling were solved for, whose positions no mask tells."""
    lowest = _lowest(solver)
    return any(number > lowest and solver.network.is_max_pooling(number) for number in solver.network.used)


def _lowest(solver: GraphSolver) -> int:
    """Return the operation that made the lowest tensor that was solved for."""
    return min((tensor.ref.node for tensor in solver.solved), default=len(solver.network.graph.nodes))


def _find_top_signal(solver: GraphSolver, top: int) -> Tensor | None:
    """Return what flows back into the last layer, or None where its input or that does not follow."""
    network, layer = solver.network, solver.network.layers[top]
    shape = network.graph.value(Ref(top)).shape
    for _, name in network.bias_like_parameters(top) if solver.images == 1 else ():
        sent = network.gradient[name]
        if name not in network.sent and sent.numel() == shape.numel():
            return sent.reshape(shape)
    if layer.groups != 1:
        return None
    try:
        taken = solver.known.value(network.layer_input(top)).reshape(layer.input_shape)
    except UnknownError:
        return None
    found = solve_signal(layer, taken)
    return found[0].reshape(shape) if found is not None and found[1] < MAX_MISFIT else None


def _known_masks(solver: GraphSolver) -> dict[int, Tensor]:
    """Return the masks of all activations whose outputs were solved for, or follow from what was."""
    found = {}
    for activation in solver.network.activations:
        try:
            found[activation] = solver.known.mask(activation)
        except UnknownError:
            continue
    return found


def _is_more_precise(second: GraphSolver, first: GraphSolver) -> bool:
    """Return whether a descent explains the gradients of what both solved for better."""
    before = {tensor.ref: tensor.misfit for tensor in first.solved}
    shared = [(tensor.misfit, before[tensor.ref]) for tensor in second.solved if tensor.ref in before]
    return bool(shared) and sum(math.log((now + 1e-300) / (then + 1e-300)) for now, then in shared) < 0
