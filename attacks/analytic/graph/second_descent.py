"""Solves a network's layers again from the classifier's signal, with the activation masks that a first descent found.

A descent that begins with the shifts of a convolution's gradient carries their error down: noise grows from one
position to the next, and by the condition of what flows back. Once the masks are known that beginning is not needed.
The first descent's features tell the classifier's input, and with it what flows back into the classifier: of one image
that is its bias gradient itself, rounded as single numbers are. All signals below follow from that one and the masks,
as precisely.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from attacks.analytic.graph.classifier_signal import find_classifier_signal
from attacks.analytic.graph.layer_solves import solve_signal
from attacks.analytic.graph.normalized_layers import is_normalization
from attacks.analytic.graph.propagation import Propagation, UnknownError
from attacks.analytic.graph.solver import MAX_MISFIT, GraphSolver, SolvedTensor
from attacks.network.operation_trace import IMAGE, Ref
from fl.tensors import per_image

TRIED = 3
"""Tensors of the first descent, the highest ones, down to which a second one has to explain more to go on."""
MAX_SIZE_EFFECT = 1e-2
"""Share of the classifier's features that may change with the size of a tensor whose size does not count."""
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
    if not all(tensor.scaled for tensor in first.solved):
        return _descend_below_normalizations(first, top)
    signal = _find_signal_by_bias(first, top)
    signal = _find_signal_by_input(first, top) if signal is None else signal
    if signal is None or (_is_precise(first) and not _normalizes(first)):
        return first
    masks = _known_masks(first.known)
    begun = _descend(first, top, signal, masks, first.solved[:TRIED][-1].ref.node)
    if not _is_more_precise(begun, first):
        return first  # what the update itself rounds is as imprecise everywhere
    second = _descend(first, top, signal, masks, IMAGE)
    return second if _lowest(second) <= _lowest(first) and _is_more_precise(second, first) else first


def _is_precise(solver: GraphSolver) -> bool:
    """Return whether every tensor explains its gradient so well that a second descent is not worth it."""
    return max(tensor.misfit for tensor in solver.solved) < MIN_MISFIT


def _normalizes(solver: GraphSolver) -> bool:
    """Return whether something is normalized by its own statistics, where errors of what flows back grow fast."""
    return any(is_normalization(solver.network, number) for number in solver.network.used)


def _descend(first: GraphSolver, top: int, signal: Tensor, masks: Mapping[int, Tensor], lowest: int) -> GraphSolver:
    """Return a descent from the last layer down to an operation."""
    known = Propagation(first.network, masks=dict(masks))
    known.set_signal(Ref(top), signal)
    solver = GraphSolver(first.network, first.images, known, scaled=True, anchor=first.anchor)
    solver.run(lowest)
    return solver


def _descend_below_normalizations(first: GraphSolver, top: int) -> GraphSolver:
    """Return a descent through normalizations by statistics of one image, which leave the first one's sizes open.

    Each tensor of the first descent has a size of its own. Those of the top block tell the last masks all the same.
    """
    found = _find_signal_and_masks(first, top)
    if found is None:
        return first
    second = _descend(first, top, *found, IMAGE)
    return second if _lowest(second) <= _lowest(first) else first


def _find_signal_and_masks(first: GraphSolver, top: int) -> tuple[Tensor, dict[int, Tensor]] | None:
    """Return what flows back into the last layer, and masks above the first two tensors that were solved for.

    None where no sizes of these make what the last layer takes. The lower one is asked alone at first: what it makes of
    the upper one is as precise as itself, while the top's mixture gives images nearly alike less precisely.
    """
    upper, lower = first.solved[:1], first.solved[1:2]
    alone = _find_by_sizes(first, top, [], lower)
    return _find_by_sizes(first, top, upper, lower) if alone is None else alone


def _find_by_sizes(
    first: GraphSolver, top: int, fixed: Sequence[SolvedTensor], resized: Sequence[SolvedTensor]
) -> tuple[Tensor, dict[int, Tensor]] | None:
    """Return what flows back into the last layer, and the masks that follow, by tensors at sizes looked for.

    Args:
        first: a descent that has ended.
        top: the last layer.
        fixed: tensors whose size does not count, or is known.
        resized: tensors whose size is looked for, one number for each image.
    """
    network, ref = first.network, first.network.layer_input(top)
    gradient = _classifier_gradient(first, top)
    if gradient is None:
        return None
    inputs = network.layers[top].weight.shape[1]

    def known(sizes: Tensor, fixed_size: float = 1.0) -> Propagation:
        values = {tensor.ref: fixed_size * tensor.values for tensor in fixed}
        return Propagation(network, values | {one.ref: one.values * per_image(sizes, one.values) for one in resized})

    def features(sizes: Tensor, fixed_size: float = 1.0) -> Tensor:
        taken = known(sizes, fixed_size).value(ref).reshape(first.images, inputs)
        return torch.cat([taken, torch.ones_like(taken)], 1)[:, : gradient.shape[1]]

    try:
        found = find_classifier_signal(gradient, features, first.images)
        if found is None:
            return None
        is_sized = all(tensor.scaled for tensor in fixed)
        if not (is_sized or _are_alike(features(found.sizes), features(found.sizes, 2.0))):
            return None  # a size that is not told would be taken for the image's
    except UnknownError:
        return None
    by_bias = _find_signal_by_bias(first, top)
    signal = found.signal.reshape(network.graph.value(Ref(top)).shape) if by_bias is None else by_bias
    return signal, _known_masks(known(found.sizes))


def _are_alike(one: Tensor, other: Tensor) -> bool:
    """Return whether features are the same but for the small number that a normalization adds to variances."""
    return float((one - other).norm()) <= MAX_SIZE_EFFECT * float(one.norm())


def _classifier_gradient(solver: GraphSolver, top: int) -> Tensor | None:
    """Return the gradient of a linear layer's weight, its bias's as one column more; None where it is not known."""
    network, layer = solver.network, solver.network.layers[top]
    rows = (solver.images, layer.weight.shape[0])
    if layer.sent is not None or layer.groups != 1 or network.graph.value(Ref(top)).shape != rows:
        return None
    columns = [layer.gradient.flatten(1)]
    for _, name in network.bias_like_parameters(top):
        if name not in network.sent and network.gradient[name].numel() == rows[1]:
            columns.append(network.gradient[name].reshape(-1, 1))
    return torch.cat(columns[:2], 1)


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
