"""APRIL reads pictures off a position embedding's gradient (Lu et al., CVPR 2022, arXiv 2112.14087)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from attacks.analytic.vit.patch_equations import PatchSolution
from attacks.analytic.vit.token_embedding import TokenEmbedding
from attacks.analytic.vit.token_subspaces import PatchSubspaces, TokenNetwork, separate_images
from attacks.base import Attack, NotApplicable, Reconstruction, Result, attacks
from attacks.labels.recovery import single_label
from attacks.network.layer_chain import make_trace
from attacks.update.float_rounding import relative_rounding
from attacks.update.observed_update import ObservedUpdate
from attacks.update.step_gradient import exact_step_gradient
from attacks.update.training_phases import training_phases
from fl.ranges import Count, OpenShare
from fl.tensors import Tensors, dense
from fl.view import ServerView

MIN_EQUATIONS = 2.0
"""Equations for each unknown of one image of a batch, at least."""


@attacks.register("april")
@dataclass(frozen=True, kw_only=True)
class April(Attack):
    """Solves for the patches of images by the gradients of position embedding and patch layer (Lu et al., 2022).

    A vision transformer adds a learned number to each of the D numbers of each of its T tokens z = W x_t + b + p_t. So
    dL/dp is what flows back into the tokens, and dL/dW = sum over t of (dL/dp_t) x_t^T: linear equations for the
    patches, D for the T unknowns of each place in a patch. They fix the picture if the T signals are independent, which
    takes T <= D. Attention, labels and classifier above play no part.

    Images of a batch are told apart first, by the subspaces that their tokens lie in at the layers above
    (`attacks.analytic.vit.token_subspaces`): that takes all tokens of the batch, T for each image, to be well below D,
    and mean cross entropy.

    Both parameters are found by what the network does with them (`attacks.network.operation_trace`): the layer is a
    convolution, or a linear layer that is given patches; between its outputs and the sum with the embedding anything
    affine may stand, such as a class token put before the others, and between image and layer a normalization and a new
    order.

    Threat model: an honest-but-curious server that knows the weights and sees one step on one image, or a few.

    Attributes:
        fits: verified where no more than this share of dL/dW is unexplained, the signals are independent, and rounding,
            magnified by the condition number of the equations, puts the worst pixel off by less than half a level of 8
            bits, as far as that can be estimated. Of a batch each image has to pass, with the others subtracted.
        max_unknowns: tell a batch's images apart only where one has no more.
    """

    takes_plain_weights: ClassVar[bool] = True
    plain: ClassVar[str] = (
        "reads the picture off a vision transformer's update: what flowed back into its patches is in the position "
        "embedding's."
    )

    fits: OpenShare = 1e-3
    max_unknowns: Count = 10_000

    @classmethod
    def example(cls) -> April:
        """Return the attack as it is."""
        return cls()

    def attack_view(self, view: ServerView, seed: int) -> Result:
        """Attack one view; nothing is random."""
        gradient = exact_step_gradient(view, batches=True)
        if isinstance(gradient, NotApplicable):
            return gradient
        found = make_trace(view, view.device)
        if isinstance(found, NotApplicable):
            return found
        model, graph = found
        tokens = TokenEmbedding.of(graph)
        if isinstance(tokens, NotApplicable):
            return tokens
        for name in (tokens.position, tokens.weight):
            if name not in gradient:
                return NotApplicable(f"the gradient of {name} was not sent")
        if not all(bool(dense(gradient[name]).any()) for name in (tokens.position, tokens.weight)):
            return NotApplicable(f"{tokens.position} or {tokens.weight} did not move by more than rounding")
        signal, weight = tokens.patch_signals(_double(gradient, tokens.position)), _double(gradient, tokens.weight)
        if signal.shape[1] > signal.shape[0]:
            equations = f"{signal.shape[0]} equations ({tokens.weight}) for {signal.shape[1]} patches"
            places = tokens.patch_gradient(weight).shape[1]
            return NotApplicable(f"{equations} at each of {places} places: too few", limit=True)
        count = sum(sum(step) for steps in training_phases(view)[1] or () for step in steps)
        if count != 1:
            return self._separate_batch(view, TokenNetwork.of(model, graph, tokens), gradient, count)
        sent = {name: _double(gradient, name) for name in (tokens.position, tokens.weight)}
        doubt = sum(relative_rounding(view, name) for name in sent)
        solution = PatchSolution.of(tokens, sent, doubt)
        labels, note = single_label(view)
        return Reconstruction(
            inputs=solution.pixels.view(1, *view.task.input_shape).clamp(0, 1).to(view.dtype),
            labels=labels,
            objective=solution.off,
            private={"condition": torch.tensor(solution.condition)},
            knowledge=() if view.labels is None else ("labels",),
            verified=solution.is_sharp(self.fits),
            note="; ".join(filter(None, (note, solution.note))),
        )

    def _separate_batch(
        self, view: ServerView, network: TokenNetwork, gradient: Tensors, count: int
    ) -> Reconstruction | NotApplicable:
        """Return the images of a batch, where their subspaces tell them apart."""
        if count < 1:
            return NotApplicable("the number of images is unknown")
        if not view.task.loss.is_cross_entropy:
            why = f"images of a batch are told apart by their cross entropy, and the loss is {view.task.loss.name}"
            return NotApplicable(why, limit=True)
        if not (view.method.uses_labels and view.method.uses_plain_cross_entropy(view.client.task, view.round)):
            return NotApplicable(
                f"images of a batch are told apart by their cross entropy, which {view.method.name} adds to"
            )
        if missing := [name for name in network.names if name not in gradient]:
            return NotApplicable(f"{count} images are told apart by the gradient of {missing[0]}, which was not sent")
        sent = {name: _double(gradient, name) for name in network.names}
        doubts = {name: relative_rounding(view, name) for name in sent}
        noise = {name: doubts[name] * float(v.norm()) / math.sqrt(v.numel()) for name, v in sent.items()}
        patches, _ = network.embedding.signal_shape
        if count * patches >= max((layer.width for layer in network.layers), default=0):
            return NotApplicable(f"{count} images have {count * patches} tokens, which leave no layer room", limit=True)
        values = math.prod(view.task.input_shape)
        unknowns = min(values, patches * count * patches)
        if unknowns > self.max_unknowns:
            return NotApplicable(
                f"telling {count} images apart takes a search over {unknowns} unknowns: raise max_unknowns "
                f"({self.max_unknowns}), if there is time",
                limit=True,
            )
        equations = network.subspaces(sent, count, noise)
        if equations.count < MIN_EQUATIONS * equations.unknowns:
            return NotApplicable(_too_few(network, count, equations), limit=True)
        labels = range(view.task.num_classes) if view.labels is None else sorted(set(view.labels.tolist()))
        scale = ObservedUpdate(view).scale(network.embedding.position)
        size_known = view.threat.knows_optimizer and scale is not None
        found = separate_images(equations, sent, count, noise, labels, size_known=size_known)
        if len(found) < count:
            some = f"{len(found)} of {count} images" if found else "no image"
            return NotApplicable(f"the search told {some} apart within its starts", limit=True)
        solutions = []
        for image in found:
            others = [other.gradient for other in found if other is not image]
            own = {n: sent[n] - sum(other[n] for other in others) for n in network.embedding.names}
            doubt = sum(doubts[n] * float(sent[n].norm() / v.norm().clamp_min(1e-300)) for n, v in own.items())
            solutions.append(PatchSolution.of(network.embedding, own, doubt))
        return Reconstruction(
            inputs=torch.cat([image.pixels for image in found]).clamp(0, 1).to(view.dtype),
            labels=torch.tensor([image.label for image in found], device=view.device),
            objective=max(solution.off for solution in solutions),
            private={"condition": torch.tensor([solution.condition for solution in solutions])},
            knowledge=() if view.labels is None else ("labels",),
            verified=all(solution.is_sharp(self.fits) for solution in solutions),
            note=next((solution.note for solution in solutions if solution.note), ""),
        )


def _double(gradient: Tensors, name: str) -> Tensor:
    return dense(gradient[name]).detach().double()


def _too_few(network: TokenNetwork, count: int, equations: PatchSubspaces) -> str:
    """Return the count of equations that do not tell the images of a batch apart."""
    patches, width = network.embedding.signal_shape
    return (
        f"{count} images have {count * patches} tokens, which fill most of the {width} numbers of one: "
        f"{equations.count} equations for the {equations.unknowns} unknowns of an image are too few"
    )
