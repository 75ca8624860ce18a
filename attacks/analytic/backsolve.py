"""Exact inversion of residual networks and other graphs of layers, from the last convolution down to the picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from attacks.analytic.graph.feature_inversion import FeatureTarget, InvertedImages, invert_features
from attacks.analytic.graph.linearization import Forward
from attacks.analytic.graph.network_graph import NetworkGraph
from attacks.analytic.graph.propagation import Propagation
from attacks.analytic.graph.solver import GraphSolver, SolvedTensor
from attacks.base import Attack, NotApplicable, Reconstruction, Result, attacks
from attacks.labels.assignment import assign_labels
from attacks.labels.recovery import single_label
from attacks.network.layer_chain import trace_view
from attacks.network.operation_trace import IMAGE, Ref
from attacks.update.overflow_safe_scaling import rescale_to_unit
from attacks.update.step_gradient import exact_step_gradient
from attacks.update.training_phases import training_phases
from fl.ranges import OpenShare
from fl.seeds import stream
from fl.tensors import dense
from fl.view import ServerView

NUMBERS_PER_PIXEL = 10.0
"""Solved features that are compared, at least, for one number of the picture, where there are so many."""
MIN_FEATURE_NOISE, STUCK = 3e-6, 1e-3
"""Relative error of features, at least, by sums in float32; and what a search leaves of them
at least where it got stuck."""
ATTEMPTS, START_NOISE = 4, 0.3
"""Starts of the search for a picture, and their standard deviation around gray: a flat one stands on kinks."""
MAX_MISSED = 0.1
"""Share of a picture's features that may be missed; what misses more is no picture of them."""
DOUBTFUL_VALUE = 1e-4
"""Share of the largest feature below which one that is not zero may be a closed activation's, and is not compared."""
PIXEL_MARGIN = 1e-2
"""How far outside [0, 1] a pixel of an exact picture may come out."""
SNAP_DISTANCE = 0.2
"""Levels of 8 bits by which every pixel of a picture may miss whole levels to be taken for these."""


@attacks.register("backsolve")
@dataclass(frozen=True, kw_only=True)
class Backsolve(Attack):
    """Solves for a small batch of pictures from one gradient of a convolutional network, residual ones included.

    Threat model: an honest-but-curious server that knows the weights and that it was one step on B images. It needs no
    label, no classifier and no prior. Three steps, all of linear algebra but the last:

    1. Shifts of the last convolution's gradient give what flows back into it, up to one B x B mixing
       (`graph.shift_structure`), and sparsity undoes that (`graph.unmixing`).
    2. Where what flows back into a layer is known, its gradient is linear in its input; the input's zeros are the mask
       of the activation below, so that the signal goes on down (`graph.layer_solves`, `graph.propagation`). It ends
       where there are fewer equations than unknowns, or at an operation that hides what it took.
    3. The lowest inputs that were solved for are inverted to pixels by least squares (`graph.feature_inversion`).

    `verified` says that features and pictures explain their equations up to rounding and that the pictures make the
    update (`attacks.verification`). Under a known defense no update is made again, and it rests on the former alone. A
    picture whose residual is above the noise of its features counts only if all its pixels are at whole levels.
    `private` holds the lowest features under `features/layer`; `note` says where the solution ended, with the counts of
    equations and unknowns.

    Attributes:
        fits: verified where no image's features are missed by more than this share.
    """

    plain: ClassVar[str] = "solves for the inputs of a residual network's layers from the top, then for the pictures."

    fits: OpenShare = 1e-4

    @classmethod
    def example(cls) -> Backsolve:
        """Return the attack as it is."""
        return cls()

    def attack_view(self, view: ServerView, seed: int) -> Result:
        """Attack one view; the seed is that of the searches' starts."""
        gradient = exact_step_gradient(view, batches=True)
        if isinstance(gradient, NotApplicable):
            return gradient
        if not any(bool(dense(value).any()) for value in gradient.values()):
            return NotApplicable("the update is zero in every tensor: the network is certain of its images")
        count = sum(sum(step) for steps in training_phases(view)[1] or () for step in steps)
        network = _read_network(view, gradient, count)
        if isinstance(network, NotApplicable):
            return network
        solver = GraphSolver(network, count, Propagation(network))
        solver.run()
        if not solver.solved:
            return NotApplicable(_explain_end(solver), limit=True)
        return self._invert(view, gradient, solver, seed)

    def _invert(
        self, view: ServerView, gradient: Mapping[str, object], solver: GraphSolver, seed: int
    ) -> Reconstruction:
        """Return the pictures whose features were solved for."""
        targets = _choose_targets(solver)
        forward, single_forward = (
            _features_of(solver.network, targets, dtype) for dtype in (torch.float64, torch.float32)
        )
        wanted = [_as_target(solver.network, target) for target in targets]
        found = _search_pictures(forward, single_forward, wanted, view.task.input_shape, seed)
        images, snapped = _snap(found.images)
        verified = self._is_explained(found, images, snapped)
        labels, note = single_label(view) if len(images) == 1 else (assign_labels(view, gradient, images), "")
        shown = bool((found.residual <= MAX_MISSED).any())
        missed = (
            f"of {len(images)} pictures {int((found.residual > MAX_MISSED).sum())} were not found, only their features"
        )
        end = "" if verified else f"the equations end at {_explain_end(solver)}"
        return Reconstruction(
            inputs=images.clamp(0, 1).to(view.device, view.dtype) if shown else None,
            labels=labels if shown or len(images) == 1 else None,
            objective=float(found.residual.max()),
            knowledge=("labels",) if len(images) == 1 and view.labels is not None else (),
            private={f"features/{'+'.join(t.by)}": t.values for t in targets[:1]},
            verified=verified,
            fixed=torch.ones_like(images, dtype=torch.bool) if verified and snapped else None,
            note="; ".join(filter(None, (note, "" if bool((found.residual <= MAX_MISSED).all()) else missed, end))),
        )

    def _is_explained(self, found: InvertedImages, images: Tensor, snapped: bool) -> bool:
        """Return whether the features are missed by no more than their noise, or all pixels came out at whole levels.

        A residual that is small but above the noise may be that of a picture some levels off.
        """
        if not (snapped or bool(found.converged.all())):
            return False
        within = bool((images > -PIXEL_MARGIN).all() and (images < 1 + PIXEL_MARGIN).all())
        return within and bool((found.residual <= self.fits).all())


def _read_network(view: ServerView, gradient: Mapping[str, object], count: int) -> NetworkGraph | NotApplicable:
    single = trace_view(view, view.device)
    if isinstance(single, NotApplicable):
        return single
    batch = single if count == 1 else trace_view(view, view.device, count=count)
    if isinstance(batch, NotApplicable):
        return batch
    if [node.operation for node in single[1].nodes] != [node.operation for node in batch[1].nodes]:
        other = "it computes a batch by other operations than one image (instance normalization, for one)"
        return NotApplicable(other, limit=True)
    sent = {name: dense(value).detach().to(view.device, torch.float64) for name, value in gradient.items()}  # type: ignore[arg-type]
    even, _ = rescale_to_unit({**sent})
    return NetworkGraph(batch[1], single[1], {name: dense(value) for name, value in even.items()})


def _features_of(
    network: NetworkGraph, targets: Sequence[SolvedTensor], dtype: torch.dtype
) -> Callable[[Tensor], list[Tensor]]:
    """Return the function from images to what the targets are compared with: of ReLUs, what goes into them."""
    paths = [_path_around_activation(network, target) for target in targets]
    nodes, graph = network.operations_to([start for start, _, _ in paths]), network.graph_in_precision(dtype)

    def features(images: Tensor) -> list[Tensor]:
        values = graph.replay_values(nodes, {Ref(IMAGE): images})
        return [graph.replay(above, end, {skipped: values[start]}) if above else values[start]
                for (start, above, end), skipped in zip(paths, skips, strict=True)]  # fmt: skip

    skips = [network.flows_into(above[0])[0] if above else start for start, above, _ in paths]
    return features


def _search_pictures(
    forward: Forward, single_forward: Forward, targets: Sequence[FeatureTarget], shape: Sequence[int], seed: int
) -> InvertedImages:
    """Return the pictures of the features, each from the start, of several, whose search leaves least."""
    count, best = len(targets[0].value), None
    waiting = torch.arange(count, device=targets[0].value.device)
    for attempt in range(ATTEMPTS):
        some = [
            replace(t, value=t.value[waiting], known=None if t.known is None else t.known[waiting]) for t in targets
        ]
        draw = stream(seed, "backsolve", attempt)
        noise = torch.randn(count, *shape, generator=draw, dtype=torch.float64).to(some[0].value)
        start = (0.5 + START_NOISE * noise)[waiting]
        if best is not None:  # what is near goes on from where it is
            near = best.residual[waiting] < STUCK
            start[near] = best.images[waiting][near]
        found = invert_features(forward, some, start.shape, single_forward=single_forward, start=start)
        if best is None:
            best = found
        else:
            better = found.residual < best.residual[waiting]
            at = waiting[better]
            best.images[at], best.residual[at] = found.images[better], found.residual[better]
            best.converged[at] = found.converged[better]
        waiting = torch.nonzero(~best.converged)[:, 0]
        if not len(waiting):
            break
    assert best is not None
    return best


def _path_around_activation(network: NetworkGraph, target: SolvedTensor) -> tuple[Ref, list[int], Ref]:
    """Return what goes into a target's ReLU, the max pooling between both if there is one, and the target."""
    activation = _rectifier(network, target)
    if activation is None:
        return target.ref, [], target.ref
    above = [] if activation == target.ref.node else [target.ref.node]
    return network.flows_into(activation)[0], above, target.ref


def _rectifier(network: NetworkGraph, target: SolvedTensor) -> int | None:
    """Return the ReLU that makes a target, or of which a max pooling makes it; both may change places."""
    number = target.ref.node
    if number >= 0 and network.is_max_pooling(number):
        number = network.flows_into(number)[0].node
    activation = network.activations.get(number)
    return number if activation is not None and activation.slope == 0 else None


def _as_target(network: NetworkGraph, target: SolvedTensor) -> FeatureTarget:
    small = DOUBTFUL_VALUE * target.values.abs().max()
    return FeatureTarget(
        target.values,
        known=(target.values == 0) | (target.values.abs() > small),
        noise=max(target.misfit, MIN_FEATURE_NOISE),
        rectified=_rectifier(network, target) is not None,
        unknown_scale=not target.scaled,
    )


def _choose_targets(solver: GraphSolver) -> list[SolvedTensor]:
    """Return the solved tensors nearest to the picture, as many as there must be numbers."""
    pixels = solver.network.graph.image.numel()
    chosen: list[SolvedTensor] = []
    for tensor in sorted(solver.solved, key=lambda solved: solved.ref.node):
        if chosen and sum(int((t.values != 0).sum()) for t in chosen) >= NUMBERS_PER_PIXEL * pixels:
            break
        chosen.append(tensor)
    return chosen


def _snap(images: Tensor) -> tuple[Tensor, bool]:
    """Return the pictures, at whole levels of 8 bits where all pixels of all are near to one."""
    levels = (255 * images).round()
    near = bool(((255 * images - levels).abs() < SNAP_DISTANCE).all())
    return (levels / 255, True) if near else (images, False)


NO_LAYER = "no convolution's weight was sent as it is used: there is no layer to begin with"
"""Why nothing is solved where no layer could be asked."""


def _explain_end(solver: GraphSolver) -> str:
    """Say at which layer the solution ended and why."""
    lowest = solver.solved[-1].by[0] if solver.solved else ""
    reasons = [*solver.ends.items(), *solver.waiting.items()]
    return next((f"{name}: {reason}" for name, reason in reasons if name != lowest), NO_LAYER)
