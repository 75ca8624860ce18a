"""Exact inversion of convolutional networks with max pooling, layer by layer from the top."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from attacks.analytic.april import April
from attacks.analytic.backsolve import Backsolve
from attacks.analytic.maxpool.batch_separation import SeparatedBatch
from attacks.analytic.maxpool.determined_pixels import find_determined_pixels
from attacks.analytic.maxpool.solver import BATCH_NEARLY_SOLVED, solve_layer
from attacks.analytic.recursive.joint_inversion import TooFewEquations, invert_jointly, measure_misfits
from attacks.analytic.recursive.pooled_conv_equations import (
    ActivationOutputs,
    conv_equations,
    input_statistics,
    pooling_between,
)
from attacks.analytic.recursive.relu_batch_separation import first_layer_with_signal, separate_images
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
from attacks.update.float_rounding import RMS_ROUNDING, relative_rounding
from attacks.update.lora_updates import refuse_lora_update
from attacks.update.observed_update import ObservedUpdate
from attacks.update.overflow_safe_scaling import rescale_to_unit
from attacks.update.step_gradient import exact_step_gradient
from attacks.update.training_phases import training_phases
from attacks.verification.nearly_told import mark_nearly_told
from attacks.verification.words import LOADER
from fl.tensors import dense
from fl.view import ServerView

UNTRAINED_BIASES = (
    "the bias {} did not move, though its weight did: it is not trained, or not sent, or all that flows back into it "
    "sums to zero (a loss that compares examples), and nothing says what does"
)
LEFT_OUT = "not confirmed: numbers of {} that the defense left out count as zero, and may tell of pixels"
MAX_UNKNOWNS = 12_288
"""Numbers of a batch's inputs of one convolution that are solved for: their covariance has so many rows."""
MAX_UNEXPLAINED = 1e-3
"""Share of a linear layer's gradient, unexplained, that is no longer rounding."""
MAX_CHAIN_ERROR = 1e-2
"""Share of a layer's equations that layer by layer may stay unexplained before `backsolve` is asked, too."""
MAX_TOGETHER_ERROR = 0.25
"""Share of the equations of all layers together that a picture may leave before it counts as none."""
MAX_FEATURE_UNCERTAINTY = 1e-3
"""Share of the root mean square by which each number of a layer's input may be off if it is returned with a picture."""
MAX_FINISHED = 1_024
"""Numbers of a verified picture up to which all equations together are asked which of its pixels they fix."""
PIXEL_MARGIN = 1e-2
"""How far outside [0, 1] a pixel may come out of equations that are satisfied."""


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
        refused = _refusal(stages[: top + 1], gradients)
        if refused is not None:
            return refused
        first = (
            _top_of_one_image(stages, gradients, top) if count == 1 else _top_of_batch(stages, gradients, top, count)
        )
        if isinstance(first, NotApplicable):
            return first
        found = _invert_layers(view, stages, gradients, top, first)
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


def _refusal(stages: Sequence[Stage], gradients: dict[str, Tensor]) -> NotApplicable | None:
    """Return why the stages can't be undone, or None."""
    if reason := _missing_update(stages, gradients):
        return NotApplicable(reason)
    reason = _unsupported(stages)
    return NotApplicable(reason, limit=True) if reason else None


def _missing_update(stages: Sequence[Stage], gradients: dict[str, Tensor]) -> str | None:
    """Return what the update or the model lacks, or None."""
    for stage in stages:
        weight = gradients.get(f"{stage.name}.weight")
        if weight is None:
            return f"the update says nothing of {stage.name}: its weight was not sent"
        if not bool(weight.any()):
            return f"the update says nothing of {stage.name}: its weight moved by no more than rounding"
        if not bool(weight.isfinite().all()):
            return f"the update of {stage.name} has numbers that are not finite"
        parts = (stage.before, stage.layer, stage.after)
        if not all(bool(value.isfinite().all()) for part in parts for value in part.state_dict().values()):
            return f"the model has numbers at {stage.name} that are not finite"
        bias = gradients.get(f"{stage.name}.bias")
        if isinstance(stage.layer, nn.Linear) and bias is not None and not bool(bias.any()):
            return f"the bias of {stage.name} did not move although its weight did: its update is lost (to rounding?)"
    return None


def _unsupported(stages: Sequence[Stage]) -> str | None:
    """Return what of the stages is not handled here, or None."""
    first = stages[0]
    if not first.pointwise:
        return (
            f"what lies between the image and {first.name} ({_module_names(first.before)}) loses or mixes its numbers"
        )
    if isinstance(first.layer, nn.Conv2d) and input_statistics(first) is None:
        return f"the normalization before {first.name} ({_module_names(first.before)}) differs from place to place"
    for below, stage in zip([None, *stages], stages, strict=False):
        if isinstance(stage.layer, nn.Conv2d) and tuple(stage.layer.dilation) != (1, 1):
            return f"{stage.name} is dilated, which is not handled; see the attack rconv"
        if below is not None and isinstance(below.layer, nn.Conv2d) and pooling_between(below, stage) is None:
            there = _module_names([*below.after, below.activation, *stage.before])
            return f"what lies between {below.name} and {stage.name} ({there}) can't be undone: {SUPPORTED}"
        if below is not None and (few := _too_few_equations(below, stage)):
            return few
    return None


def _too_few_equations(stage: Stage, above: Stage) -> str | None:
    """Return by how much the equations of a convolution fall short of its large input, or None."""
    conv = stage.layer
    if not isinstance(conv, nn.Conv2d) or stage.layer_input_shape.numel() <= MAX_UNKNOWNS:
        return None
    pooled, weight = pooling_between(stage, above), conv.weight
    own, unknown = weight[:, 0].numel(), stage.layer_input_shape[1:].numel()
    if pooled is None or pooled.average or pooled.window == (1, 1) or own >= unknown:
        return None
    return f"{stage.name} has {own} gradient equations for the {unknown} numbers of each channel of its input"


def _module_names(modules: Iterable[nn.Module]) -> str:
    """Return where in the model some modules stand, in words."""
    return ", ".join(str(getattr(module, "place", type(module).__name__)) for module in modules)


SUPPORTED = "it takes at most one normalization and one pooling without padding, averages before activations"
"""What may stand between two layers."""


def _top_of_one_image(stages: Sequence[Stage], gradients: dict[str, Tensor], top: int) -> SeparatedBatch:
    """Return the signal and input of the top layer for one image: its gradient is their outer product."""
    weight, signal = (gradients[f"{stages[top].name}.{kind}"] for kind in ("weight", "bias"))
    values = (signal @ weight) / (signal @ signal)
    return SeparatedBatch(signal[None], values[None], 0.0, 0.0)


def _top_of_batch(
    stages: Sequence[Stage], gradients: dict[str, Tensor], top: int, count: int
) -> SeparatedBatch | NotApplicable:
    """Return signals and inputs of the top layer for the images of a batch, or why they can't be told apart."""
    for lower in stages[:top]:
        if isinstance(lower.layer, nn.Conv2d) and count * lower.layer_input_shape.numel() > MAX_UNKNOWNS:
            numbers = f"{count * lower.layer_input_shape.numel()} numbers, more than {MAX_UNKNOWNS} at once"
            return NotApplicable(f"{count} inputs of {lower.name} are {numbers}", limit=True)
    return separate_images(stages, gradients, top, count)


def _invert_layers(
    view: ServerView, stages: Sequence[Stage], gradients: dict[str, Tensor], top: int, first: SeparatedBatch
) -> Reconstruction:
    """Undo one stage after the other, from the top layer of the images in `first` down to the picture."""
    descent = _InversionState.begin(view, stages, gradients, top, first)
    for number in range(top, -1, -1):
        if number < top:
            descent.undo_activation(number)
        if isinstance(stages[number].layer, nn.Linear):
            descent.undo_linear(number)
            continue
        try:
            stopped = descent.undo_convolution(number)
        except StoppedError as error:
            return descent.cut_short(stages[number].name, str(error))
        if stopped is not None:
            return stopped
    return descent.reconstruction()


@dataclass
class _InversionState:
    """Where a descent stands, from the top layer down; tensors of all images, one by one (B, ...).

    Attributes:
        view: what the server saw.
        stages: of its network, bottom first.
        gradients: of the weights, by name.
        top: number of the stage it begins at.
        separated: signals and inputs of that stage.
        values: the input of the stage undone last.
        signal: what flows back into that stage's input, or, once its activation is undone, into a layer's output.
        std: how far each of the values may be off, relative to the root mean square of all.
        relative_error: how far the equations of the layers undone so far are off, at most.
        signal_noise: how far the signal may be off in every layer below, relative to its root mean square.
        verified: whether every layer is explained so far.
        activation_outputs: what is known of what the next layer returned.
        residuals: what the inputs found leave of each layer's equations.
        notes: on layers whose equations are not satisfied.
        visible_cells: rows and columns of a convolution's pooled outputs that the stage above saw.
        fixed: which pixels the equations determine, once the image is reached.
        features: the input of the lowest layer above the picture down to which all inputs are determined, by name.
    """

    view: ServerView
    stages: Sequence[Stage]
    gradients: dict[str, Tensor]
    top: int
    separated: SeparatedBatch
    values: Tensor
    signal: Tensor
    std: Tensor
    signal_noise: float
    verified: bool
    relative_error: float = 0.0
    activation_outputs: ActivationOutputs | None = None
    residuals: dict[str, Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    visible_cells: tuple[int, int] | None = None
    fixed: Tensor | None = None
    features: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def begin(
        cls, view: ServerView, stages: Sequence[Stage], gradients: dict[str, Tensor], top: int, first: SeparatedBatch
    ) -> _InversionState:
        """Begin at the stage `top`, with the signals and inputs of its layer."""
        names = [stages[top].parameter_name(kind) for kind in ("weight", "bias")]
        return cls(
            view,
            stages,
            gradients,
            top,
            first,
            values=first.inputs,
            signal=first.signals,
            std=torch.zeros_like(first.inputs),
            signal_noise=max(first.relative_error, relative_rounding(view, stages[top].parameter_name("bias"))),
            # an unknown defense may have shortened weight and bias apart, a known one may have left out all that tells
            # of a pixel: only a second layer shows it
            verified=top > 0 or (view.threat.knows_defense and ObservedUpdate(view).is_complete(*names)),
        )

    def undo_activation(self, number: int) -> None:
        """Go from the input of the stage above to what this stage's layer returned."""
        stage, above = self.stages[number], self.stages[number + 1]
        self.activation_outputs = ActivationOutputs.of(stage, above, self.values, self.signal, self.std)
        self.signal = self.activation_outputs.signal
        self.signal_noise = math.hypot(self.signal_noise, self.activation_outputs.signal_noise)

    def undo_linear(self, number: int) -> None:
        """Return the input of a linear layer: known at the top, and below the least squares of its gradient."""
        stage, is_top = self.stages[number], number == self.top
        assert isinstance(stage.layer, nn.Linear)
        weight = self.gradients[f"{stage.name}.weight"]
        if not is_top:
            self.values = torch.linalg.solve(self.signal @ self.signal.mT, self.signal @ weight)
        residual = weight - self.signal.mT @ self.values
        share = float(residual.norm() / weight.norm())
        self.residuals[stage.name] = torch.tensor([share, self.separated.unexplained * is_top], dtype=weight.dtype)
        self.relative_error = max(share, RMS_ROUNDING * torch.finfo(self.view.dtype).eps, self.separated.relative_error)
        if not self.relative_error < MAX_UNEXPLAINED:
            self.verified = False
            self.notes.append(f"{stage.name}: its gradient explained up to {self.relative_error:.1e}")
        self._keep_features(number)
        self.signal = self.signal @ stage.layer.weight.detach()
        self.std = torch.full_like(self.values, self.relative_error)

    def undo_convolution(self, number: int) -> Reconstruction | None:
        """Return the input of a convolution (`attacks.analytic.maxpool`); a result where the descent ends there."""
        stage = self.stages[number]
        assert self.activation_outputs is not None
        self.relative_error = max(self.relative_error, relative_rounding(self.view, stage.parameter_name("weight")))
        equations = conv_equations(
            self.view, stage, self.stages[number + 1], self.gradients, self.activation_outputs, self.visible_cells
        )
        equations = replace(equations, gradient_noise=self.relative_error, signal_noise=self.signal_noise)
        layer, scale = equations.layer, input_statistics(stage) if number == 0 else None
        solution = solve_layer(equations, scale)
        fit = solution.fit
        self.residuals[stage.name] = torch.tensor([fit.gradient_error, fit.output_error])
        self.verified = self.verified and solution.is_satisfied
        if not solution.is_satisfied:
            self.notes.append(f"{stage.name}: {solution.progress_description}")
        if len(self.values) > 1 and number > 0 and not fit.error < BATCH_NEARLY_SOLVED:
            return _partial_result(self.residuals, stage.name, layer.split_images(fit.x), self.notes)
        if number == 0 and self.verified:
            assert scale is not None
            self.fixed = layer.split_images(find_determined_pixels(solution, *scale))
            self.verified = bool(self.fixed.all())
        self.values, self.signal = layer.split_images(fit.x), layer.split_images(solution.input_signal)
        self.relative_error, self.visible_cells = max(fit.gradient_error, self.relative_error), layer.visible_input_size
        if number > 0:
            self.std = layer.split_images(solution.relative_uncertainty())
        self._keep_features(number)
        return None

    def _keep_features(self, number: int) -> None:
        """Keep the input of the layer undone last, if all equations down to it are satisfied and determine it."""
        if number > 0 and not self.notes and bool((self.std <= MAX_FEATURE_UNCERTAINTY).all()):
            self.features = {f"features/{self.stages[number].name}": self.values}

    def cut_short(self, name: str, reason: str) -> Reconstruction:
        """Return what was found above the layer `name`, at which the time was up."""
        words = f"not done before {reason}: ended at {name}"
        return Reconstruction(
            inputs=None,
            objective=_largest_residual(self.residuals) if self.residuals else float("nan"),
            private={**{f"residual/{layer}": value for layer, value in self.residuals.items()}, **self.features},
            verified=False,
            note="; ".join([*self.notes, words]),
            cut_short=words,
        )

    def reconstruction(self) -> Reconstruction:
        """Return the picture, once the first stage is undone."""
        view, image = self.view, self.stages[0].undo_input_maps(self.values)
        names = [self.stages[0].parameter_name(kind) for kind in ("weight", "bias")]
        if (
            not self.top
            and not self.notes
            and view.threat.knows_defense
            and not ObservedUpdate(view).is_complete(*names)
        ):
            self.notes.append(LEFT_OUT.format(self.stages[0].name))
        within = bool((image > -PIXEL_MARGIN).all() and (image < 1 + PIXEL_MARGIN).all())
        if not within:
            self.verified, self.fixed = False, None
            stated = "[0, 1]" if view.task.inputs.is_image else "the range that was stated for it"
            hint = f": {LOADER}" if view.task.inputs.is_image and not self.notes else ""
            self.notes.append(f"the picture came out beyond {stated} and was cut off there{hint}")
        found = Reconstruction(
            inputs=image.clamp(0, 1).to(view.device, view.dtype),
            knowledge=("labels",) if len(image) == 1 and view.labels is not None else (),
            objective=_largest_residual(self.residuals),
            private={**{f"residual/{name}": value for name, value in self.residuals.items()}, **self.features},
            verified=self.verified,
            fixed=None if self.fixed is None else self.fixed.to(view.device),
            note="; ".join(self.notes),
        )
        return mark_nearly_told(view, found, image)


def _largest_residual(residuals: dict[str, Tensor]) -> float:
    """Return the largest of all; what is not a number is worse than any."""
    return float(torch.cat(list(residuals.values())).nan_to_num(nan=math.inf).max())


def _partial_result(residuals: dict[str, Tensor], name: str, features: Tensor, notes: list[str]) -> Reconstruction:
    """Return what there is of a batch whose images could not be followed below the layer `name`."""
    return Reconstruction(
        inputs=None,
        objective=_largest_residual(residuals),
        private={**{f"residual/{n}": value for n, value in residuals.items()}, f"features/{name}": features},
        verified=False,
        note="; ".join([*notes, "the layers below it were not tried"]),
    )
