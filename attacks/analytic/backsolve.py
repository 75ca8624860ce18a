"""Exact inversion of residual networks and other graphs of layers, from the last convolution down to the picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from attacks.analytic.graph.batch_normalization import find_normalizations
from attacks.analytic.graph.evaluation_mode import FeaturesAlone, FewerImages, solve_in_evaluation_mode
from attacks.analytic.graph.feature_inversion import InvertedImages
from attacks.analytic.graph.network_graph import NetworkGraph
from attacks.analytic.graph.picture_search import SolvedPictures
from attacks.analytic.graph.solver import ASKED_OF_UPDATES, SolvedTensor
from attacks.analytic.graph.training_mode import solve_in_training_mode
from attacks.analytic.graph.unsent_entries import find_sent
from attacks.base import Attack, NotApplicable, Reconstruction, Remark, Result, attacks
from attacks.labels.assignment import assign_labels, assign_labels_by_features, count_labels
from attacks.labels.recovery import single_label
from attacks.network.elementwise_regions import find_activations, with_activations
from attacks.network.layer_chain import make_trace, trace_view
from attacks.network.recurrent import recurrent_obstacle
from attacks.search_control import named_in_time
from attacks.update.classifier_update import classifier_names
from attacks.update.observed_update import ObservedUpdate
from attacks.update.overflow_safe_scaling import rescale_to_unit
from attacks.update.sparsification import are_smallest_left_out
from attacks.update.step_gradient import exact_step_gradient
from attacks.update.training_phases import training_phases
from fl.ranges import OpenShare
from fl.tensors import dense
from fl.view import ServerView

MAX_MISSED = 0.1
"""Share of a picture's features that may be missed; what misses more is no picture of them."""
PIXEL_MARGIN = 1e-2
"""How far outside [0, 1] a pixel of an exact picture may come out."""
MAX_OPEN_SHARE = 0.02
"""Share of the pictures' numbers that may be open for them to be borne out by the update: of more, others make it."""
WHOLE_GRADIENTS = (
    "with batch normalization in training mode it takes whole gradients, and the defense left some of {!r} out"
)
"""What may be why a pruned update in training mode is not solved, beside what the solver says."""
SMALLEST_AS_ZEROS = "the defense left out the smallest numbers, here {:.0%} of {!r}, and they count as zeros"
"""Why the equations of an update contradict each other whose smallest numbers are missing."""
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

    Where a known defense left entries of the update out, as pruning does, those that were sent have their equations,
    and the gradient to begin with is completed by its low rank (`graph.unsent_entries`).

    Where the network's batch normalization is in training mode, the steps are those of `graph.training_mode`: residual
    blocks are solved with the batch's statistics, which the buffers as they came back tell
    (docs/design/batch-statistics.md), and all pictures are found together. It refuses where the buffers are missing.

    `verified` says that features and pictures explain their equations up to rounding and that the pictures make the
    update (`attacks.verification`). Under a known defense no update is made again, and it rests on the former alone. A
    picture whose residual is above the noise of its features counts only if all its pixels are at whole levels,
    and determined by what was solved for.
    `private` holds the lowest features under `features/layer`; `note` says where the solution ended, with the counts of
    equations and unknowns.

    Attributes:
        fits: verified where no image's features are missed by more than this share.
    """

    inverted_prefixes: ClassVar[frozenset[str]] = frozenset({"normalized"})
    takes_plain_weights: ClassVar[bool] = True
    plain: ClassVar[str] = "solves for the inputs of a residual network's layers from the top, then for the pictures."

    fits: OpenShare = 1e-4

    @classmethod
    def example(cls) -> Backsolve:
        """Return the attack as it is."""
        return cls()

    def input_obstacle(self, view: ServerView) -> NotApplicable | None:
        """Refuse recurrent networks as well."""
        return super().input_obstacle(view) or recurrent_obstacle(view)

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
        solved: SolvedPictures | FeaturesAlone | NotApplicable
        if norms := find_normalizations(network):
            solved = solve_in_training_mode(view, network, norms, seed)
            if isinstance(solved, NotApplicable) and network.sent:
                whole = WHOLE_GRADIENTS.format(next(iter(network.sent)))
                return replace(solved, reason=f"{solved.reason}; {whole}", limit=True)
        else:
            solved = self._solve_distinct(view, gradient, network, count, seed)
            if isinstance(solved, NotApplicable) and (zeros := _count_smallest_as_zeros(view, gradient)):
                return replace(solved, reason=f"{solved.reason.replace(ASKED_OF_UPDATES, '')}; {zeros}", limit=True)
        if isinstance(solved, FeaturesAlone):
            return _report_features(view, solved)
        return solved if isinstance(solved, NotApplicable) else self._report(view, gradient, solved)

    def _solve_distinct(
        self, view: ServerView, gradient: Mapping[str, object], network: NetworkGraph, count: int, seed: int
    ) -> SolvedPictures | FeaturesAlone | NotApplicable:
        """Return the pictures of a batch, in which one may be there several times.

        Equal images are one to the equations. What they leave in the classifier says how many each stands for.
        """
        solved = solve_in_evaluation_mode(network, count, view.task.input_shape, seed)
        if not isinstance(solved, FewerImages):
            return solved
        distinct = solved.count
        fewer = _read_network(view, gradient, distinct)
        if isinstance(fewer, NotApplicable):
            return fewer
        solved = solve_in_evaluation_mode(fewer, distinct, view.task.input_shape, seed)
        if isinstance(solved, FewerImages):
            return NotApplicable(f"the batch looks as of {distinct} distinct images, and these as of {solved.count}")
        if isinstance(solved, FeaturesAlone):
            return solved
        if isinstance(solved, NotApplicable):
            return replace(solved, reason=f"as of {distinct} distinct images: {solved.reason}")
        labels = count_labels(view, gradient, _snap(solved.found.images)[0], count)
        if labels is None:
            uncounted = f"{count} images look as of {distinct} distinct ones, and nothing tells how often each is there"
            return NotApplicable(uncounted, limit=True)
        return solved.repeat(labels)

    def _report(self, view: ServerView, gradient: Mapping[str, object], solved: SolvedPictures) -> Reconstruction:
        """Return the pictures with what is told of them."""
        found = solved.found
        images, snapped = _snap(found.images)
        explained = self._is_explained(found, images, snapped)
        verified = explained and not solved.unseen
        unseen = f"{solved.unseen} numbers of the pictures are not told by what was solved for"
        end = f"the equations end at {solved.end}" if not explained else unseen if solved.unseen else ""
        labels, note = solved.labels, ""
        if labels is None:
            labels, note = named_in_time(lambda: self._name_labels(view, gradient, solved, images), (None, ""))
        shown = bool((found.residual <= MAX_MISSED).any())
        missed = (
            f"of {len(images)} pictures {int((found.residual > MAX_MISSED).sum())} were not found, only their features"
        )
        return Reconstruction(
            inputs=images.clamp(0, 1).to(view.device, view.dtype) if shown else None,
            labels=labels if shown or len(images) == 1 else None,
            objective=float(found.residual.max()),
            knowledge=("labels",) if len(images) == 1 and view.labels is not None else (),
            private={_name_of(solved.lowest): solved.lowest.values},
            verified=verified,
            fixed=torch.ones_like(images, dtype=torch.bool) if verified and snapped else None,
            note="; ".join(filter(None, (note, "" if bool((found.residual <= MAX_MISSED).all()) else missed, end))),
            remarks=frozenset({Remark.PARTLY_TOLD} if solved.unseen > MAX_OPEN_SHARE * images.numel() else ()),
        )

    def _name_labels(
        self, view: ServerView, gradient: Mapping[str, object], solved: SolvedPictures, images: Tensor
    ) -> tuple[Tensor | None, str]:
        """Return the pictures' labels, None where nothing tells them, and what is to be noted of them."""
        if len(images) == 1:
            return single_label(view)
        labels = assign_labels(view, gradient, images)
        if labels is None:  # pictures that were not found have their features all the same
            labels = self._labels_by_features(view, gradient, solved)
        return labels, ""

    @staticmethod
    def _labels_by_features(view: ServerView, gradient: Mapping[str, object], solved: SolvedPictures) -> Tensor | None:
        """Return the labels that the classifier's gradient tells by what was solved for at its input."""
        weight = classifier_names(view, view.update)[0]
        known = None if weight is None else solved.linear.get(weight)
        return None if known is None else assign_labels_by_features(view, gradient, *known)

    def _is_explained(self, found: InvertedImages, images: Tensor, snapped: bool) -> bool:
        """Return whether the features are missed by no more than their noise, or all pixels came out at whole levels.

        A residual that is small but above the noise may be that of a picture some levels off. Noise may be more than
        `fits`: that all pixels come out at whole levels by chance is out of the question then, too.
        """
        converged = bool(found.converged.all())
        if not (snapped or converged):
            return False
        within = bool((images > -PIXEL_MARGIN).all() and (images < 1 + PIXEL_MARGIN).all())
        return within and ((snapped and converged) or bool((found.residual <= self.fits).all()))


def _report_features(view: ServerView, solved: FeaturesAlone) -> Reconstruction:
    """Return the features that were solved for when the time was up."""
    size = "" if solved.lowest.scaled else ", those of each image up to a factor"
    words = f"not done before {solved.reason}: features alone{size}"
    return Reconstruction(
        inputs=None,
        labels=single_label(view)[0] if view.batch_size == 1 else None,
        private={_name_of(solved.lowest): solved.lowest.values},
        verified=False,
        note=words,
        cut_short=words,
    )


def _name_of(features: SolvedTensor) -> str:
    return f"features/{'+'.join(features.by)}"


def _read_network(view: ServerView, gradient: Mapping[str, object], count: int) -> NetworkGraph | NotApplicable:
    single = trace_view(view, view.device)
    if isinstance(single, NotApplicable) and count > 1:
        single = make_trace(view, view.device, running_statistics=True)
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
    activations = find_activations(single[1])
    of_batch, of_one = (with_activations(trace[1], activations) for trace in (batch, single))
    values = {name: dense(value) for name, value in even.items()}
    return NetworkGraph(of_batch, of_one, values, _find_gaps(view, values))


def _find_gaps(view: ServerView, gradient: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return which entries of gradients are known, for tensors from which a known defense left some out.

    Where it left out the smallest, whole slices are missing, and their zeros are nearer to the truth than nothing.
    """
    sent = _find_sent_entries(view, gradient)
    if are_smallest_left_out([gradient[name][which] for name, which in sent.items()]):
        return {}
    known = {name: find_sent(gradient[name], which) for name, which in sent.items()}
    return {name: which for name, which in known.items() if not bool(which.all())}


def _find_sent_entries(view: ServerView, gradient: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return where entries of gradients were sent, for tensors from which a known defense left some out."""
    observed = ObservedUpdate(view)
    gaps = (name for name, value in gradient.items() if bool(value.any()) and not observed.is_complete(name))
    return {name: observed.transmitted(name).to(gradient[name].device) for name in gaps}


def _count_smallest_as_zeros(view: ServerView, gradient: Mapping[str, object]) -> str:
    """Return which tensor lost most of its (smallest) numbers, in words; empty if none did."""
    values = {name: dense(value) for name, value in gradient.items()}  # type: ignore[arg-type]
    sent = _find_sent_entries(view, values)
    if not are_smallest_left_out([values[name][which] for name, which in sent.items()]):
        return ""
    missing = {name: 1 - float(which.double().mean()) for name, which in sent.items()}
    most = max(missing, key=lambda name: missing[name])
    return SMALLEST_AS_ZEROS.format(missing[most], most)


def _snap(images: Tensor) -> tuple[Tensor, bool]:
    """Return the pictures, at whole levels of 8 bits where all pixels of all are near to one."""
    levels = (255 * images).round()
    near = bool(((255 * images - levels).abs() < SNAP_DISTANCE).all())
    return (levels / 255, True) if near else (images, False)
