"""Solves a network's layers again from the classifier's signal, with the activation masks that a first descent found.

A descent that begins with the shifts of a convolution's gradient carries their error down: noise grows from one
position to the next, and by the condition of what flows back. Once the masks are known that beginning is not needed.
The first descent's features tell the classifier's input, and with it what flows back into the classifier: of one image
that is its bias gradient itself, rounded as single numbers are. All signals below follow from that one and the masks,
as precisely.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from scipy.optimize import minimize_scalar
from torch import Tensor

from attacks.analytic.graph.layer_solves import KnownSignal, solve_input, solve_signal
from attacks.analytic.graph.propagation import Propagation, UnknownError
from attacks.analytic.graph.solver import MAX_MISFIT, GraphSolver
from attacks.network.operation_trace import IMAGE, Ref
from attacks.search_control import check_time_limit

TRIED = 3
"""Tensors of the first descent, the highest ones, down to which a second one has to explain more to go on."""
MOST_DECADES, STEPS = 8.0, 64
"""Powers of ten by which the size of a tensor may be off to either side, and steps in which that is looked for."""
MAX_TOP_MISS = 1e-3
"""Share of what the last layer takes that tensors of the first descent may miss for their masks to be believed."""
MIN_MISFIT = 5e-5
"""Misfit of the worst tensor of a first descent above which there is a second one. Where features are precise, fewer of
them are compared with the picture's. Behind a pre-trained ResNet-20, whose first descents leave less than this, fewer
pictures were found so."""


def descend_again(first: GraphSolver) -> GraphSolver:
    """Return a more precise solution of the same layers, or of more layers, or the first where there is none.

    Args:
        first: a descent that has ended.

    Raises:
        StoppedError: the time limit has passed.
    """
    if not first.anchor or _crossed_pooling(first):
        return first
    top = max(first.network.layers)
    signal = _find_signal_by_bias(first, top)
    if not all(tensor.scaled for tensor in first.solved):  # then what else tells the signal has no size either
        return first if signal is None else _descend_below_normalizations(first, top, signal)
    signal = _find_signal_by_input(first, top) if signal is None else signal
    if signal is None or max(tensor.misfit for tensor in first.solved) < MIN_MISFIT:
        return first
    masks = _known_masks(first.known)
    begun = _descend(first, top, signal, masks, first.solved[:TRIED][-1].ref.node)
    if not _is_more_precise(begun, first):
        return first  # what the update itself rounds is as imprecise everywhere
    second = _descend(first, top, signal, masks, IMAGE)
    return second if _lowest(second) <= _lowest(first) and _is_more_precise(second, first) else first


def _descend(first: GraphSolver, top: int, signal: Tensor, masks: Mapping[int, Tensor], lowest: int) -> GraphSolver:
    """Return a descent from the last layer down to an operation."""
    known = Propagation(first.network, masks=dict(masks))
    known.set_signal(Ref(top), signal)
    solver = GraphSolver(first.network, first.images, known, scaled=True, anchor=first.anchor)
    solver.run(lowest)
    return solver


def _descend_below_normalizations(first: GraphSolver, top: int, signal: Tensor) -> GraphSolver:
    """Return a descent through normalizations by statistics of one image, which leave the first one's sizes open.

    Each tensor of the first descent has a size of its own. Those of the top block tell the last masks all the same.
    """
    masks = _find_top_masks(first, top, signal)
    if masks is None:
        return first
    second = _descend(first, top, signal, masks, IMAGE)
    return second if _lowest(second) <= _lowest(first) else first


def _find_top_masks(first: GraphSolver, top: int, signal: Tensor) -> dict[int, Tensor] | None:
    """Return masks above the first two tensors that were solved for, or None where they do not make what the top takes.

    What the last layer takes follows from what flows back into it. It tells the size of the one relative to the other.
    """
    network, ref = first.network, first.network.layer_input(top)
    solved = solve_input([KnownSignal(network.layers[top], signal.reshape(network.layers[top].output_shape))])
    if first.images > 1 or solved is None:
        return None
    wanted = solved.values.reshape(network.graph.value(ref).shape)
    upper, *lower = first.solved[:2]

    def known(exponent: float) -> Propagation:
        return Propagation(
            network, {upper.ref: upper.values} | {tensor.ref: 10**exponent * tensor.values for tensor in lower}
        )

    def miss(exponent: float) -> float:
        check_time_limit()
        return float((known(exponent).value(ref) - wanted).norm() / wanted.norm())

    try:
        coarse = min((MOST_DECADES * step / STEPS for step in range(-STEPS, STEPS + 1)), key=miss)
        found = minimize_scalar(miss, bounds=(coarse - 1, coarse + 1), method="bounded", options={"xatol": 1e-9}).x
        return _known_masks(known(found)) if miss(found) <= MAX_TOP_MISS else None
    except UnknownError:
        return None


def _crossed_pooling(solver: GraphSolver) -> bool:
    """Return whether tensors below a max pooling were solved for, whose positions no mask tells."""
    lowest = _lowest(solver)
    return any(number > lowest and solver.network.is_max_pooling(number) for number in solver.network.used)


def _lowest(solver: GraphSolver) -> int:
    """Return the operation that made the lowest tensor that was solved for."""
    return min((tensor.ref.node for tensor in solver.solved), default=len(solver.network.graph.nodes))


def _find_signal_by_bias(solver: GraphSolver, top: int) -> Tensor | None:
    """Return what flows back into the last layer, as its bias's gradient is for one image, or None without that."""
    network, shape = solver.network, solver.network.graph.value(Ref(top)).shape
    for _, name in network.bias_like_parameters(top) if solver.images == 1 else ():
        sent = network.gradient[name]
        if name not in network.sent and sent.numel() == shape.numel():
            return sent.reshape(shape)
    return None


def _find_signal_by_input(solver: GraphSolver, top: int) -> Tensor | None:
    """Return what flows back into the last layer, by what it takes, or None where that or the other does not follow."""
    network, layer = solver.network, solver.network.layers[top]
    if layer.groups != 1:
        return None
    try:
        taken = solver.known.value(network.layer_input(top)).reshape(layer.input_shape)
    except UnknownError:
        return None
    found = solve_signal(layer, taken)
    shape = network.graph.value(Ref(top)).shape
    return found[0].reshape(shape) if found is not None and found[1] < MAX_MISFIT else None


def _known_masks(known: Propagation) -> dict[int, Tensor]:
    """Return the masks of all activations whose outputs were solved for, or follow from what was."""
    found = {}
    for activation in known.network.activations:
        try:
            found[activation] = known.mask(activation)
        except UnknownError:
            continue
    return found


def _is_more_precise(second: GraphSolver, first: GraphSolver) -> bool:
    """Return whether a descent explains the gradients of what both solved for better."""
    before = {tensor.ref: tensor.misfit for tensor in first.solved}
    shared = [(tensor.misfit, before[tensor.ref]) for tensor in second.solved if tensor.ref in before]
    return bool(shared) and sum(math.log((now + 1e-300) / (then + 1e-300)) for now, then in shared) < 0
