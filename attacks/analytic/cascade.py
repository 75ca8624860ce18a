"""Exact inversion of convolutional networks with max pooling, layer by layer from the top."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from attacks.analytic.april import April
from attacks.analytic.backsolve import Backsolve
from attacks.analytic.recursive.chain_descent import invert_layers, top_of_batch, top_of_one_image
from attacks.analytic.recursive.chain_obstacles import find_obstacle
from attacks.analytic.recursive.joint_inversion import TooFewEquations, invert_jointly, measure_misfits
from attacks.analytic.recursive.pooled_conv_equations import (
    pooling_between,
)
from attacks.analytic.recursive.relu_batch_separation import first_layer_with_signal
from attacks.analytic.repeated_images import attack_repeated_image
from attacks.analytic.vit.token_embedding import TokenEmbedding
from attacks.base import Attack, NotApplicable, Reconstruction, Result, attacks
from attacks.labels.assignment import assign_labels
from attacks.labels.recovery import single_label
from attacks.network.autograd_support import flat_obstacle
from attacks.network.curved_activations import ValleyActivation
from attacks.network.layer_chain import Stage, extract_layer_chain, gradients_by_layer, trace_view
from attacks.network.recurrent import SEARCH, recurrent_obstacle
from attacks.search_control import StoppedError, named_in_time
from attacks.update.earlier_rounds import EARLIER_ROUNDS, rounds_on_same_images
from attacks.update.lora_updates import refuse_lora_update
from attacks.update.overflow_safe_scaling import rescale_to_unit
from attacks.update.step_gradient import exact_step_gradient
from attacks.update.training_phases import training_phases
from fl.tensors import dense
from fl.view import ServerView

UNTRAINED_BIASES = (
    "the bias {} did not move, though its weight did: it is not trained, or not sent, or all that flows back into it "
    "sums to zero (a loss that compares examples), and nothing says what does"
)
MAX_CHAIN_ERROR = 1e-2
"""Share of a layer's equations that layer by layer may stay unexplained before `backsolve` is asked, too."""
MAX_TOGETHER_ERROR = 0.25
"""Share of the equations of all layers together that a picture may leave before it counts as none."""
MAX_FINISHED = 1_024
"""Numbers of a verified picture up to which all equations together are asked which of its pixels they fix."""


@attacks.register("cascade")
@dataclass(frozen=True, kw_only=True)
class Cascade(Attack):
    """Solves for the input of one layer after the other, from the last linear layer with a bias down to the pixels.

    In the spirit of R-GAP (Zhu and Blaschko, ICLR 2021), which needs layers without pooling; the equations are ours.
    Threat model: an honest-but-curious server that knows it was one step on one image or a small batch, and the weights
    of a chain of convolutions, pooling, activations and linear layers; no label, classifier or trained prior. What
    flows back into a linear layer is its bias gradient; its input follows from the weight's. Images are told apart
    first (`attacks.analytic.maxpool.batch_separation`) and come back in no particular order, verified all or none, with
    their labels where the classifier is shared (`attacks.labels.assignment`). For a convolution whose outputs and their
    signal are known, the gradient of its weight and its own forward equations are linear in its input once it is known
    which position each pooling cell passed on; `attacks.analytic.maxpool` finds that out. Of one image, layers that
    can't be undone one by one are solved together below the lowest linear layer
    (`attacks.analytic.recursive.joint_inversion`): several convolutions before a pooling, pooling with padding or
    that averages what an activation bent, the steps of recurrent layers. Of activations that fall before they rise
    (GELU, SiLU) a value's larger input is taken, or the smaller where all else says so.

    `verified` needs no truth: every layer's input explains the layer's gradient and outputs up to rounding, and these
    fix every pixel to a level of 8 bits; `fixed` says which pixels they fix. At the rim, where few outputs see a pixel,
    they often leave a choice, so that most color images are not verified for a few pixels in the corners. Where
    pooling never looked (corners of flat regions) a pixel counts as fixed if moving it, whatever else moves that no
    equation fixes, would have made another output the largest. What neither fixes comes from a smooth prior.

    All is solved in float64 where the view lies, but for what sorts out a batch or a few loose pixels.

    `private` holds, under `residual/layer`, what the input found leaves of the layer's gradient and of its outputs.
    Every search is bounded (docs/design/cascade.md says by what), and `note` names the layers whose equations it did
    not satisfy, and says where the picture left [0, 1]. Of a batch, a layer above the pixels that is left far from them
    is the end: its input is returned under `features/layer`, image by image, and no picture. So is, beside a picture,
    the input of the lowest layer above it down to which equations are satisfied and determine all.

    A network that is no such chain (residual connections, several convolutions before a pooling) is handed to
    `attacks.analytic.backsolve` first, and what it verifies is returned. So is an update in which a layer of the chain
    did not move, as below a head at zero, or was not sent. A vision transformer, which adds a position embedding to
    its tokens, is handed to `attacks.analytic.april` where neither solves it.

    Where the server kept earlier rounds on the same images, and the last one's result is not verified, each is tried,
    the oldest first, until one is: a network gives away less of images the better it has learned them. `note` says of
    which round the picture is, and so is `verified`; that the last round fed the same is taken for granted.
    """

    inverted_prefixes: ClassVar[frozenset[str]] = frozenset({"pixelwise", "normalized"})
    takes_plain_weights: ClassVar[bool] = True
    plain: ClassVar[str] = "solves for the input of one layer after the other, from the last one down to the picture."

    @classmethod
    def example(cls) -> Cascade:
        """Return the attack, which has no settings."""
        return cls()

    def attack_view(self, view: ServerView, seed: int) -> Result:
        """Attack one view; the seed is that of `backsolve`, where that is asked."""
        best, taken, tried = self._attack_round(view, seed), view, False
        if isinstance(best, NotApplicable):
            best = attack_repeated_image(view, self._attack_round, seed) or best
        for earlier in rounds_on_same_images(view):
            if isinstance(best, Reconstruction) and best.verified:
                break
            try:
                other, tried = self._attack_round(earlier, seed), True
            except StoppedError as stopped:
                if isinstance(best, NotApplicable):
                    raise
                best = replace(best, cut_short=f"not done before {stopped}: earlier rounds")
                break
            if _rank_result(other) < _rank_result(best):
                best, taken = other, earlier
        if isinstance(best, NotApplicable) and best.limit and (narrow := refuse_lora_update(view)) is not None:
            return narrow
        return _note_round(best, taken.round, view.round) if tried else best

    def _attack_round(self, view: ServerView, seed: int) -> Result:
        """Return what one round gives away, all layers together where they can't be undone one by one."""
        if (recurrent := recurrent_obstacle(view, SEARCH)) is not None:
            return _solve_jointly(view, recurrent, None)
        found = self._solve_chain(view)
        if isinstance(found, NotApplicable):
            other = _solve_together(view, seed, found) if found.limit else _solve_by_graph(view, seed, found)
            return _solve_tokens(view, other) if isinstance(other, NotApplicable) else other
        if found.verified:
            return found
        try:
            return _finish(view, seed, found)
        except StoppedError as stopped:
            words = f"not done before {stopped}: what else explains it"
            return replace(found, cut_short="; ".join(filter(None, (found.cut_short, words))))

    def _solve_chain(self, view: ServerView) -> Result:
        """Return what one round gives away of a chain of layers."""
        gradient = exact_step_gradient(view, batches=True)
        if isinstance(gradient, NotApplicable):
            return gradient
        device = _solving_device(view)
        count = sum(sum(step) for steps in training_phases(view)[1] or () for step in steps)
        # the ratio of all is what counts: in a unit of their own no square overflows or runs under
        precise = {n: dense(g).detach().to(device, torch.float64) for n, g in gradient.items()}
        stages = extract_layer_chain(view, lossy=True, device=device)
        if isinstance(stages, NotApplicable):
            return stages
        sent = gradients_by_layer(stages, precise)
        even, _ = rescale_to_unit({**sent})
        gradients = {n: dense(g) for n, g in even.items()}
        top = first_layer_with_signal(stages, gradients)
        if top is None:
            return _no_signal(stages, gradients)
        refused = find_obstacle(stages[: top + 1], gradients)
        if refused is not None:
            return refused
        first = top_of_one_image(stages, gradients, top) if count == 1 else top_of_batch(stages, gradients, top, count)
        if isinstance(first, NotApplicable):
            return first
        found = invert_layers(view, stages, gradients, top, first)
        if count == 1:
            return _with_label(view, found)
        if (images := found.inputs) is None:
            return found
        return replace(found, labels=named_in_time(lambda: assign_labels(view, gradients, images), None))


def _no_signal(stages: Sequence[Stage], gradients: Mapping[str, Tensor]) -> NotApplicable:
    """Say why no linear layer of a chain tells what flows back into it."""
    linear = [
        stage.name for stage in stages if isinstance(stage.layer, nn.Linear) and f"{stage.name}.bias" in gradients
    ]
    untrained = [f"{name}.bias" for name in linear if bool(gradients[f"{name}.weight"].any())]
    if untrained:
        return NotApplicable(UNTRAINED_BIASES.format(untrained[-1]))
    if linear:
        return NotApplicable(
            "no linear layer's bias moved by more than rounding: no gradient reached it, as of an image that the "
            "network is certain of"
        )
    why = f": {stages[-1].end_reason}" if stages[-1].end_reason else ""
    return NotApplicable(f"no linear layer with a bias is in the update: nothing says what flows back{why}", limit=True)


def _with_label(view: ServerView, found: Reconstruction) -> Reconstruction:
    """Return what was found of a single image with its label."""
    labels, note = named_in_time(lambda: single_label(view), (None, ""))
    return replace(found, labels=labels, note="; ".join(filter(None, (found.note, note))))


def _solve_together(view: ServerView, seed: int, refused: NotApplicable) -> Result:
    """Return what is found of layers that can't be undone one by one, by `backsolve` and by all equations together.

    Of one image the latter are asked where `backsolve` verified nothing. Where it did, they are asked which pixels are
    fixed, if the picture has no more than `MAX_FINISHED` numbers. They begin at its picture if there is one.
    """
    if flat := flat_obstacle(view):
        return replace(refused, reason=f"{refused.reason}; all equations together: {flat}")
    by_graph = Backsolve().attack_view(view, seed)
    if isinstance(by_graph, NotApplicable):
        jointly = _solve_jointly(view, refused, None)
        if isinstance(jointly, Reconstruction):
            return jointly
        if by_graph.reason == refused.reason:
            return jointly
        return replace(jointly, reason=f"{jointly.reason}; by backsolve: {by_graph.reason}")
    if by_graph.cut_short:
        return by_graph
    start = by_graph.inputs
    if by_graph.verified and start is not None and start.numel() > MAX_FINISHED:
        return _doubted(view, by_graph)
    jointly = _solve_jointly(view, refused, start)
    if by_graph.verified:
        return jointly if isinstance(jointly, Reconstruction) and jointly.verified else _doubted(view, by_graph)
    if isinstance(jointly, Reconstruction):
        return jointly if start is None or not jointly.note else _note_both(jointly, by_graph)
    return jointly if isinstance(jointly, TooFewEquations) else _unless_worthless(view, by_graph, jointly)


def _solve_by_graph(view: ServerView, seed: int, refused: NotApplicable) -> Result:
    """Return what `backsolve` verifies where the update lacks something that layer by layer needs, or why nothing.

    It begins at what did move, and needs no gradient of layers below: frozen ones, or all below a head at zero. What it
    does not verify there is one of many pictures with the same few features.
    """
    if flat_obstacle(view):
        return refused
    found = Backsolve().attack_view(view, seed)
    if isinstance(found, NotApplicable) or not (found.verified or found.cut_short):
        return refused
    return _doubted(view, found)


def _solve_tokens(view: ServerView, refused: NotApplicable) -> Result:
    """Return what `april` solves for where the network adds a position embedding to tokens, or all reasons why not."""
    traced = trace_view(view, _solving_device(view))
    if isinstance(traced, NotApplicable):
        return refused
    tokens = TokenEmbedding.of(traced[1])
    if isinstance(tokens, NotApplicable) and not tokens.limit:
        return refused
    found = April().attack_view(view, 0)  # nothing in it is drawn
    if isinstance(found, Reconstruction) or found.reason == refused.reason:
        return found
    both = f"{refused.reason}; by april: {found.reason}"
    return NotApplicable(both, limit=refused.limit or found.limit, cut_short=refused.cut_short or found.cut_short)


def _doubted(view: ServerView, found: Reconstruction) -> Reconstruction:
    """Return a picture that its features verify; not verified where it leaves much of all equations together."""
    residual = _measure_misfit(view, found)
    if residual is None or residual <= MAX_TOGETHER_ERROR:
        return found
    note = "; ".join(filter(None, (found.note, _say_residual(residual))))
    return replace(found, objective=residual, verified=False, fixed=None, note=note)


def _unless_worthless(view: ServerView, found: Reconstruction, refused: NotApplicable) -> Result:
    """Return a picture of one image with the share of all equations that it leaves; a refusal where that is much."""
    residual = _measure_misfit(view, found)
    if residual is None:
        return found
    if not residual <= MAX_TOGETHER_ERROR:
        return replace(refused, reason=f"{refused.reason}; by backsolve: a picture by which {_say_residual(residual)}")
    return replace(found, objective=residual, note="; ".join(filter(None, (found.note, _say_residual(residual)))))


def _measure_misfit(view: ServerView, found: Reconstruction) -> float | None:
    """Return which share of all equations together a picture of one image leaves; None where that is not known."""
    gradient = _even_gradient(view)
    if gradient is None or found.inputs is None:
        return None
    misfits = measure_misfits(view, gradient, _solving_device(view), [found.inputs])
    return None if misfits is None else misfits[0]


def _say_residual(residual: float) -> str:
    return f"{residual:.1e} of all equations together is left unexplained"


def _solve_jointly(view: ServerView, refused: NotApplicable, start: Tensor | None) -> Result:
    """Return what the equations of all layers tell of one image, from gray or another start, or why nothing."""
    gradient = _even_gradient(view)
    if gradient is None:
        return refused
    found = invert_jointly(view, gradient, _solving_device(view), refused, start)
    return _with_label(view, found) if isinstance(found, Reconstruction) else found


def _even_gradient(view: ServerView) -> dict[str, Tensor] | None:
    """Return one image's gradient in double precision, up to a factor; None for several images, or if unknown."""
    gradient = exact_step_gradient(view)
    if isinstance(gradient, NotApplicable):
        return None
    even, _ = rescale_to_unit(
        {n: dense(g).detach().to(_solving_device(view), torch.float64) for n, g in gradient.items()}
    )
    return {n: dense(g) for n, g in even.items()}


def _better_explained(view: ServerView, seed: int, found: Reconstruction) -> Reconstruction:
    """Return what `backsolve` finds of one image, if it explains more of all equations than what was found before.

    Where it leaves much, too, it is not verified, whatever its features say, and the chain's words stay.
    """
    gradient = _even_gradient(view)
    if gradient is None or found.inputs is None:
        return found
    other = Backsolve().attack_view(view, seed)
    if not isinstance(other, Reconstruction) or other.inputs is None:
        return found
    misfits = measure_misfits(view, gradient, _solving_device(view), [found.inputs, other.inputs])
    if misfits is None:
        return other if other.verified else found
    own, its = misfits
    if own <= its:
        return found
    if other.verified and its <= MAX_CHAIN_ERROR:
        return other
    note = "; ".join(filter(None, (found.note and f"layer by layer: {found.note}", f"by backsolve: {other.note}")))
    return replace(other, objective=its, verified=False, fixed=None, note=note)


def _finish(view: ServerView, seed: int, chain: Reconstruction) -> Reconstruction:
    """Return what explains most of the update, beginning at a picture of the chain that is not verified.

    Where the chain left much, `backsolve` is asked, too.
    """
    finished = _finish_together(view, chain)
    if finished.verified or finished.cut_short or not chain.objective > MAX_CHAIN_ERROR:
        return finished
    other = _better_explained(view, seed, chain)
    if other is chain:
        return finished
    again = other if other.verified else _finish_together(view, other)
    return again if again.verified or finished is chain or again.objective < finished.objective else finished


def _finish_together(view: ServerView, found: Reconstruction) -> Reconstruction:
    """Return what all equations together make of one picture where layer by layer often leaves some of it open.

    It is `found` itself where the network is not of that kind, or nothing that explains more was found. Where `found`
    says which pixels its equations fix, these were explained, and only a verified picture replaces it.
    """
    gradient = None if found.inputs is None else _even_gradient(view)
    if gradient is None or found.inputs is None:
        return found
    stages = extract_layer_chain(view, lossy=True, device=_solving_device(view))
    if isinstance(stages, NotApplicable) or not _has_valley_or_overlap(stages):
        return found
    try:
        jointly = _solve_jointly(view, NotApplicable(found.note), found.inputs)
    except StoppedError as error:
        return replace(found, cut_short=f"not done before {error}: all layers together")
    if not isinstance(jointly, Reconstruction) or jointly.inputs is None:
        return found
    if jointly.verified:
        return jointly
    if found.fixed is not None:
        return found
    misfits = measure_misfits(view, gradient, _solving_device(view), [found.inputs, jointly.inputs])
    return found if misfits is None or misfits[0] <= misfits[1] else jointly


def _has_valley_or_overlap(stages: Sequence[Stage]) -> bool:
    """Return whether an activation of a chain falls before it rises, or windows of its pooling overlap."""
    if any(isinstance(stage.activation, ValleyActivation) for stage in stages):
        return True
    pairs = [pair for pair in itertools.pairwise(stages) if isinstance(pair[0].layer, nn.Conv2d)]
    pools = [pooled for pair in pairs if (pooled := pooling_between(*pair)) is not None]
    return any(pooled.stride != pooled.window for pooled in pools)


def _note_both(jointly: Reconstruction, by_graph: Reconstruction) -> Reconstruction:
    """Return what all equations together led to, with the words of the attack whose picture they began at."""
    return replace(jointly, note="; by backsolve: ".join(filter(None, (jointly.note, by_graph.note))))


def _solving_device(view: ServerView) -> torch.device:
    """Return where to solve: where the view is, but for a device without double precision."""
    return torch.device("cpu") if view.device.type == "mps" else view.device


def _rank_result(result: Result) -> tuple[bool, bool, bool, bool, float]:
    """Return a key that sorts rounds without the truth, better ones first."""
    if isinstance(result, NotApplicable):
        return True, True, True, True, math.inf
    return False, result.inputs is None, not result.verified, bool(result.note), result.objective


def _note_round(result: Result, taken: int, last: int) -> Result:
    """Return the result with a note on the round that it is from."""
    if isinstance(result, NotApplicable):
        return result
    whence = f"the picture is that of round {taken}" if taken != last else ""
    note = "; ".join(filter(None, (result.note, whence)))
    return replace(result, knowledge=(*result.knowledge, EARLIER_ROUNDS), note=note)
