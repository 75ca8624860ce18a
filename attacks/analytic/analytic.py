"""Reads the input of the first linear layer off its gradient, in closed form or up to a factor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from attacks.analytic.centralized_gradients import picture_behind
from attacks.analytic.clipped_rows import invert_unclipped_rows
from attacks.analytic.input_scale import invert_direction
from attacks.analytic.repeated_images import attack_repeated_image
from attacks.analytic.scale_judgment import other_range
from attacks.analytic.single_image_rows import SingleImageRows, largest_noise
from attacks.base import Attack, NotApplicable, Reconstruction, Remark, Result, attacks
from attacks.labels.batch_weights import batch_weights
from attacks.labels.recovery import single_label
from attacks.search_control import StoppedError
from attacks.update.classifier_update import classifier_names
from attacks.update.first_linear_layer import LinearLayer, first_linear, layers_of_inputs
from attacks.update.float_rounding import relative_rounding
from attacks.update.lora_updates import refuse_lora_update
from attacks.update.observed_update import ObservedUpdate
from attacks.update.sparsification import leaves_out_at_random
from attacks.update.update_rule import RuleKind, kind_of_update_rule
from attacks.verification.nearly_told import FAR_OUTSIDE, MOST_ALIKE_ROWS, mark_nearly_told
from attacks.verification.replay_checks import reproduces_update, reproduces_update_under_any_loss
from fl.defense import overrides
from fl.ranges import OpenShare
from fl.tensors import Tensors
from fl.view import ServerView

GAP_TOLERANCE = 1e-3
"""How far an entry of the input may be from zero, relative to the root mean square of all, that a gap bounds."""
ALTERNATIONS = 20
"""Rounds of the rank-one fit: under noise or a mask the bias alone is a poor guess of the signal."""

ROUNDING_MARGIN, MAX_ROUNDING = 1.5, 0.02
"""What may stay unexplained of one image's update, relative to the rounding of the weights, and as a share of all."""
PASSED_OVER = "the features are what {!r} takes: the network uses the linear layers below, {}, more than once"
LEFT_OUT_OF_BATCH = (
    "the defense left out numbers of {!r}: of several images the attack asks the whole update of that layer whether a "
    "neuron sees one of them alone"
)
CUT_TO_RANGE = (
    "what the first layer takes lies beyond the range of inputs as stated, and was cut off there: if that range is "
    "wrong, state the right one (input_range, --input-range)"
)
"""What is noted where nothing tells another range from a wrong size of the update."""
SENT_FOR_CERTAIN = 1e-9
"""Chance at which a mask leaves out all numbers of a column, at most, for these to count as zeros that were sent."""
SAME_SUMMAND = 0.5
"""Overlap of two summands, 0 of different images and 1 of an image with itself, from which they count as one."""
MOST_COMPARED = 256
"""Neurons with the strongest signals that are compared for agreeing on an image."""
SHARED_WEIGHTS = (
    "how much an example counts under the loss as stated depends on the others of its batch, and not by a factor "
    "alone, or their classes may be too many to try: no image could be checked by itself"
)
NONE_ALONE = (
    "no neuron is active for one image alone, whatever its label under the loss and at the step size as stated ({}); "
    "state the loss that was trained with, its smoothing and weights of classes. A step of another size looks so, too: "
    "an lr that is off by a hundredth, a sum over examples or clients, say, in place of their mean, or a mean of "
    "another number of examples"
)
UNTOLD = (
    "what a neuron holds may be one image, but to the rounding of the update it may as well be a mixture of several: "
    "no other weights tell the same image"
)


@attacks.register("analytic")
@dataclass(frozen=True, kw_only=True)
class Analytic(Attack):
    """Reads the input of the first linear layer with a bias off its gradient (Geiping et al., NeurIPS 2020, Prop. 3.1).

    The gradients are sums over the images, gW = sum of delta x^T and gb = sum of delta.

    - One image: x = gW^T gb / |gb|^2, after any number of steps on it. Under a known defense x comes from a rank-one
      fit to the entries that it let through, each tensor weighed by its precision.
    - Several images, one step: if a ReLU silences neuron r for all images but one, that image is x = gW_r / gb_r. The
      gradient does not say which neurons these are, but candidates can be tested. Given x and a label, the network
      sends back a signal u. Then u x^T is a summand of gW only if subtracting it lowers the rank by one, that is, if u
      lies in the columns of gW and x^T gW^+ u = 1 (Wedderburn, 1934). Mixtures of flat images may pass, so that a
      second reading has to agree (`attacks.analytic.single_image_rows`). Images that pass are returned with that label.

    If the layer's input is the image, x is returned as the image, else under `features`. Special cases:

    - First layers without a bias that moved tell one image up to its brightness. Replaying the step tells brightness
      and label (`attacks.analytic.input_scale`).
    - Centralized gradients tell the picture up to its brightness, too; a centralized step tells that
      (`attacks.analytic.centralized_gradients`).
    - If a gradient looks clipped by value, rows without clipped numbers are read (`attacks.analytic.clipped_rows`).
    - An unknown defense may have scaled weight and bias by different factors. Then a rank-one fit does not show how
      bright x is, and one image is verified only if the network sends back the observed signal for it.

    Threat model: an honest server with the layer's update, and for several images all weights.

    Attributes:
        fits: residual up to which a result is `verified`: the share of the update that one image may leave, and of the
            rank test's equations. After small steps, as much as the weights' rounding may stay as well.
    """

    reads_ids: ClassVar[bool] = True
    inverted_prefixes: ClassVar[frozenset[str]] = frozenset({"pixelwise", "normalized"})
    takes_plain_weights: ClassVar[bool] = True
    plain: ClassVar[str] = "reads the picture off the update of the first fully connected layer, without guessing."

    fits: OpenShare = 1e-3

    def __post_init__(self) -> None:
        if not 0 < self.fits < 1:
            raise ValueError(f"expected fits in (0, 1), got {self.fits}")

    def confirm(self, view: ServerView, result: Result) -> Result:
        """Return the result as the update bears it out; what centralized gradients tell was held against them."""
        if isinstance(result, Reconstruction) and Remark.CENTRALIZED in result.remarks:
            return result
        return super().confirm(view, result)

    def attack_view(self, view: ServerView, seed: int) -> Reconstruction | NotApplicable:
        """Return the images, or the layer's input."""
        if view.batch_size == 1 and (found := self._invert_inputs(view)) is not None:
            return found
        layer = first_linear(view, scaled=True)
        if view.batch_size == 1 and not (isinstance(layer, LinearLayer) and layer.is_given_images):
            by_direction = invert_direction(view, self.fits)
            if isinstance(by_direction, Reconstruction):
                return by_direction
            if isinstance(layer, NotApplicable):
                if layer.limit and (narrow := refuse_lora_update(view)) is not None:
                    return narrow
                reason = "; ".join(dict.fromkeys((layer.reason, by_direction.reason)))
                return replace(layer, reason=reason, cut_short=by_direction.cut_short)
        if isinstance(layer, NotApplicable):
            return layer
        if view.batch_size == 1:
            return self._invert_single_image(view, layer)
        batch = self._invert_batch(view, layer)
        if isinstance(batch, Reconstruction) and batch.labels is not None:
            return batch
        return attack_repeated_image(view, self.attack_view, seed) or batch

    def _invert_batch(self, view: ServerView, layer: LinearLayer) -> Reconstruction | NotApplicable:
        """Return images of a batch that single neurons see alone."""
        reason = _obstacle(view, layer)
        if reason is not None or view.batch_size is None or layer.scale is None:
            if reason is None and not ObservedUpdate(view).is_complete(*layer.parameter_names):
                return NotApplicable(LEFT_OUT_OF_BATCH.format(layer.name), limit=True)
            return NotApplicable(reason or _why_size_is_unknown(view))
        return self._images_of_single_neurons(layer, view.batch_size, layer.scale / view.batch_size)

    def _invert_single_image(self, view: ServerView, layer: LinearLayer) -> Reconstruction | NotApplicable:
        if not layer.is_given_images and layer.steps != 1:
            return NotApplicable(f"{layer.name!r} is not given the image, and its input changes from step to step")
        clipped = invert_unclipped_rows(layer, self.fits) if layer.steps == 1 else None
        if clipped is not None:
            return clipped
        fit = RankOneFit.of(layer)
        labels, note = single_label(view)
        if layer.is_given_images and layer.steps == 1 and bool(fit.known.all()) and fit.residual <= self.fits:
            rule = kind_of_update_rule(view)
            if rule == RuleKind.CENTRALIZED and (found := picture_behind(layer, fit.inputs, labels, self.fits)):
                return replace(found, objective=fit.residual)
        if layer.passed_over:
            note = "; ".join(filter(None, (note, PASSED_OVER.format(layer.name, ", ".join(layer.passed_over)))))
        sized = self._is_explained(view, layer, fit) and layer.has_true_size(fit.inputs[None], layer.bias_update[None])
        whole, images = bool(fit.known.all()), layer.is_given_images
        # under other losses no label can be tried, and nothing would tell another range from a wrong size
        classified, beyond = view.task.loss.takes_classes, False
        if images and sized and whole and classified and not _is_within_range(layer, fit.inputs):
            images, note, beyond = False, "; ".join(filter(None, (note, other_range(view.task.inputs)))), True
        elif images and sized and whole and not classified and not _is_within_range(layer, fit.inputs):
            note = "; ".join(filter(None, (note, CUT_TO_RANGE)))
        private: Tensors = {} if images else {"features": fit.inputs.to(view.dtype)}
        if not whole:
            count = f"{int(fit.known.sum())} of {len(fit.known)}"
            source = "the numbers of the weight that are not masked" if layer.masked else "what the defense let through"
            note = "; ".join(filter(None, (note, f"{count} numbers of the input follow from {source}")))
        found = Reconstruction(
            inputs=layer.pixels(fit.inputs[None]) if images else None,
            labels=labels,
            objective=fit.residual,
            private=private,
            knowledge=() if view.labels is None else ("labels",),
            verified=whole and sized,
            fixed=fit.known.view(1, *view.task.input_shape) if sized and not whole and layer.lies_as_images else None,
            note=note,
            remarks=frozenset({Remark.BEYOND_RANGE} if beyond else ()),
        )
        told = whole and int(layer.update.any(1).sum()) > MOST_ALIKE_ROWS
        return mark_nearly_told(view, found) if told else found

    def _invert_inputs(self, view: ServerView) -> Reconstruction | None:
        """Return those of several inputs that a linear layer is given as they are, or None where none is.

        The others stay in the middle of their range; `fixed` says which numbers were read.
        """
        form, layers = view.task.inputs, layers_of_inputs(view)
        values = torch.full((1, form.shape[0]), 0.5, dtype=torch.float64)
        fixed, residual = torch.zeros(1, form.shape[0], dtype=torch.bool), 0.0
        sizes = [part.size for part in form.parts]
        for number, layer in layers.items():
            fit = RankOneFit.of(layer)
            if not (bool(fit.known.all()) and self._is_explained(view, layer, fit)):
                continue
            part, begin = form.parts[number], sum(sizes[:number])
            own = slice(begin, begin + part.size)
            values[:, own] = part.pack(fit.inputs.cpu().reshape(1, *part.shape)).reshape(1, -1)
            fixed[:, own], residual = True, max(residual, fit.residual)
        if not bool(fixed.any()):
            return None
        labels, note = single_label(view)
        whole = bool(fixed.all())
        missed = [part.name or str(i) for i, part in enumerate(form.parts) if not bool(fixed[0, sum(sizes[:i])])]
        said = "" if whole else f"no layer with a bias is given the input(s) {', '.join(missed)} as they are"
        sure = view.threat.knows_defense
        stated = sure and view.threat.knows_optimizer
        return Reconstruction(
            inputs=values.clamp(0, 1).reshape(1, *form.shape).to(view.device, view.dtype),
            labels=labels,
            objective=residual,
            knowledge=() if view.labels is None else ("labels",),
            verified=True if whole and sure else None,
            fixed=fixed.reshape(1, *form.shape).to(view.device) if stated else None,
            note="; ".join(filter(None, (note, said))),
        )

    def _is_explained(self, view: ServerView, layer: LinearLayer, fit: RankOneFit) -> bool:
        """Return whether one image explains the layer's update, up to what rounding of the weights leaves of it.

        Rounding is different in every number, so that the input, a mean over all rows, is known several times better.
        In a view of two bytes a number it is no excuse: the rest of the update could not confirm the size, either.
        """
        rounding = ROUNDING_MARGIN * relative_rounding(view, layer.parameter_names[0]) if view.dtype.itemsize > 2 else 0
        return fit.residual <= max(self.fits, min(rounding, MAX_ROUNDING)) and fit.error_of_noise(layer) <= self.fits

    def _images_of_single_neurons(self, layer: LinearLayer, count: int, unit: float) -> Reconstruction | NotApplicable:
        """Return images that one neuron sees alone, at most `count`.

        `unit` is what a gradient of size 1 of one image adds to the update.
        """
        rows = (layer.bias_update.abs() > 1e-9 * layer.bias_update.abs().max()).nonzero().flatten()
        inputs = layer.update[rows] / layer.bias_update[rows, None]
        within = _within_pixel_range(layer, inputs, self.fits)
        rows, inputs = rows[within], inputs[within]
        if not len(inputs):
            return NotApplicable("every neuron sees several images: no ratio of its gradients is a picture")
        whole = torch.cat([layer.update, layer.bias_update[:, None]], 1)
        left, singular, right = torch.linalg.svd(whole, full_matrices=False)
        rank = min(count, int((singular > max(1e-12 * float(singular[0]), largest_noise(layer))).sum()))
        if rank >= min(whole.shape):
            return NotApplicable("the gradient has full rank: whether a neuron sees one image can't be checked")
        gradient = _TruncatedGradient(left[:, :rank], singular[:rank], right[:rank])
        possible = layer.possible_labels()
        assert possible is not None  # which was asked before
        task = layer.view.task
        shares = batch_weights(task.loss, task.output_shape, len(possible), count, layer.view.device)
        if shares is None:
            return self._of_another_loss(layer, count) or NotApplicable(SHARED_WEIGHTS)
        found = self._summands(layer, gradient, (rows, inputs), shares, unit)
        pictures = SingleImageRows(layer, 1 / count, gradient.left, gradient.singular, gradient.right.mT, self.fits)
        kept = self._drop_duplicates(pictures, found, count)
        return (self._of_another_loss(layer, count) or kept) if isinstance(kept, NotApplicable) else kept

    def _summands(
        self,
        layer: LinearLayer,
        gradient: _TruncatedGradient,
        candidates: tuple[Tensor, Tensor],
        shares: Sequence[Tensor],
        unit: float,
    ) -> list[_Summand]:
        """Return the candidates that are pictures which some label makes a summand of the gradient.

        Args:
            layer: the layer.
            gradient: of its weight and bias.
            candidates: rows of the gradient, and what each holds, divided by the bias's.
            shares: by label how much a picture may count.
            unit: what a gradient of size 1 of one image adds to the update.
        """
        (rows, inputs), found = candidates, list[_Summand]()
        possible = layer.possible_labels()
        assert possible is not None
        left, singular, right = gradient.left, gradient.singular, gradient.right
        ones = torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1)
        for numbers, each in layer.signals(inputs, possible):
            signal = each * unit
            inside = signal @ left
            off = (signal - inside @ left.mT).norm(dim=1) / signal.norm(dim=1)
            taken = ones @ right.mT / singular
            ratio = (taken * inside).sum(1)
            counted = [own * shares[number] for own, number in zip(ratio.tolist(), numbers.tolist(), strict=True)]
            missed = off.new_tensor([float((one - 1).abs().min()) for one in counted])
            fitting = (torch.maximum(off, missed) <= self.fits).nonzero().flatten().tolist()
            found += [
                _Summand(
                    int(rows[i]),
                    (float(off[i]), float(missed[i])),
                    inputs[i],
                    possible[numbers[i]],
                    float(shares[int(numbers[i])][(counted[i] - 1).abs().argmin()]),
                    _is_least(shares[int(numbers[i])], int((counted[i] - 1).abs().argmin()), self.fits),
                    taken[i],
                    inside[i] / ratio[i],
                )
                for i in fitting
            ]
        return found

    def _of_another_loss(self, layer: LinearLayer, count: int) -> Reconstruction | None:
        """Return as many images as were fed, where none of their labels fits and they make the update otherwise.

        Neurons that see one image alone agree on it. What flows back into the outputs is then taken from the update, so
        that this is a claim to be held against the loss, and no proof. Where the layer is the classifier it is not even
        that: whatever spans the rows of its gradient makes it.
        """
        if layer.parameter_names[0] == classifier_names(layer.view, layer.view.update)[0]:
            return None
        strongest = layer.bias_update.abs().argsort(descending=True)[:MOST_COMPARED]
        inputs = layer.update[strongest] / layer.bias_update[strongest, None]
        inputs = inputs[inputs.isfinite().all(1)]
        inputs = inputs[_within_pixel_range(layer, inputs, self.fits)]
        kept: list[Tensor] = []
        for one in inputs:
            near = 10 * self.fits * float(one.norm())
            agree = int(((inputs - one).norm(dim=1) <= near).sum()) > 1
            if agree and all(float((one - other).norm()) > near for other in kept):
                kept.append(one)
        if len(kept) != count:
            return None
        images = layer.pixels(torch.stack(kept))
        found = Reconstruction(inputs=images, labels=None, objective=self.fits, verified=True)
        try:
            return found if reproduces_update_under_any_loss(layer.view, images) else None
        except StoppedError as stopped:
            return found.left_unchecked(str(stopped))

    def _drop_duplicates(
        self, alone: SingleImageRows, found: list[_Summand], count: int
    ) -> Reconstruction | NotApplicable:
        """Return each image once that the update tells to its rounding, the neuron that fits best first.

        A neuron that sees next to nothing of all other images has a blurred copy of one. Summands of one gradient lower
        its rank by one each, also together; a copy beside its image does not.

        All images of a batch together are held against the whole update, which tells them if it is just theirs.
        """
        found = sorted(found, key=lambda summand: max(summand.miss))
        kept: list[_Summand] = []
        for one in found:
            if not any(one.overlaps(other) for other in kept) and alone.holds_single_image(
                one.row, one.label, one.weight, one.miss, least=one.least
            ):
                kept.append(one)
        every = self._every_summand(alone.layer, found, count) if len(kept) < count else None
        if every is not None and not (every.cut_short and kept):  # each of those kept is told by itself
            return every
        return self._report(alone.layer, kept) if kept else NotApplicable(self._why_none(alone.layer, found))

    def _every_summand(self, layer: LinearLayer, found: list[_Summand], count: int) -> Reconstruction | None:
        """Return as many images as were fed, if there are just so many and one step on them makes the whole update."""
        kept: list[_Summand] = []
        for one in found:
            if not any(one.overlaps(other) for other in kept):
                kept.append(one)
        result = self._report(layer, kept) if len(kept) == count else None
        try:
            return result if result is not None and reproduces_update(layer.view, result) else None
        except StoppedError as stopped:
            return None if result is None else result.left_unchecked(str(stopped))

    @staticmethod
    def _why_none(layer: LinearLayer, found: list[_Summand]) -> str:
        """Return why no image is handed out."""
        return UNTOLD if found else NONE_ALONE.format(layer.view.task.loss.name)

    @staticmethod
    def _report(layer: LinearLayer, kept: list[_Summand]) -> Reconstruction:
        return Reconstruction(
            inputs=layer.pixels(torch.stack([one.inputs for one in kept])),
            labels=torch.stack([one.label for one in kept]).to(layer.view.device),
            objective=max(max(one.miss) for one in kept),
            verified=True,
        )


def _is_least(shares: Tensor, number: int, tolerance: float) -> bool:
    """Return whether none of the weights (n,) but 0 is less than that of this number by more than a share of it."""
    return not bool(((shares > 0) & (shares < shares[number] * (1 - tolerance))).any())


@dataclass(frozen=True, eq=False)
class _TruncatedGradient:
    """The gradient of a layer's weight and bias (O, n + 1), of rank R: its singular value decomposition.

    Attributes:
        left: (O, R).
        singular: (R,).
        right: (R, n + 1).
    """

    left: Tensor
    singular: Tensor
    right: Tensor


@dataclass(frozen=True, eq=False)
class _Summand:
    """What may be one image's summand of a gradient G of rank R.

    Attributes:
        row: of the gradient, which holds it.
        miss: of the rank test's equations, of direction and of size.
        inputs: x of the layer (n,).
        label: of the image.
        weight: how much it counts in the batch, where 1 is an equal share.
        least: whether it can count no less in any batch, as far as `fits` tells weights apart.
        taken: x^T G^+ in G's left singular vectors (R,).
        signal: u in the same (R,), of such a size that x^T G^+ u = 1.
    """

    row: int
    miss: tuple[float, float]
    inputs: Tensor
    label: Tensor
    weight: float
    least: bool
    taken: Tensor
    signal: Tensor

    def overlaps(self, other: _Summand) -> bool:
        """Return whether taking both away does not lower the rank by two (x^T G^+ u of one with the other is not 0)."""
        crossed = (float(self.taken @ other.signal), float(other.taken @ self.signal))
        return any(abs(value) > SAME_SUMMAND for value in crossed)


@dataclass(frozen=True)
class RankOneFit:
    """The input of a layer, from as much of its rank-one update as was sent.

    Attributes:
        inputs: x (n,).
        known: which of its entries follow from what was sent (n,).
        energy: squared signals by which each entry was measured (n,).
        residual: the unexplained share of what was sent.
    """

    inputs: Tensor
    known: Tensor
    energy: Tensor
    residual: float

    @classmethod
    def of(cls, layer: LinearLayer) -> RankOneFit:
        """Return the fit of weight and bias, each at its trust."""
        moved, bias = layer.update, layer.bias_update
        sent = torch.ones_like(moved) if layer.transmitted is None else _with_dark_pixels(layer, layer.transmitted)
        told = torch.ones_like(bias) if layer.bias_transmitted is None else layer.bias_transmitted
        moved, trust = moved * sent, layer.trust**2
        heard = ((bias != 0) * told).double() * trust
        signal = bias * told
        for _ in range(ALTERNATIONS):
            x = _ratio_or_zero(signal @ moved, signal.square() @ sent)
            signal = _ratio_or_zero(moved @ x + heard * bias, sent @ x.square() + heard)
        energy = signal.square() @ sent
        x = _ratio_or_zero(signal @ moved, energy)
        # the fit knows x up to a factor that the bias alone fixes; at the optimum it is right already
        residual = float((moved - sent * torch.outer(signal, x)).norm() / moved.norm()) if bool(moved.any()) else 0.0
        known, rows = _determined_inputs(sent, heard > 0, signal)
        if not bool(known.all()) and layer.gap_limit < math.inf:
            known |= layer.gap_limit <= GAP_TOLERANCE * x.square().mean().sqrt() * _weakest_gap(
                layer.update, signal * rows
            )
        return cls(x, known, energy, residual)

    def error_of_noise(self, layer: LinearLayer) -> float:
        """Return the standard error that a known defense's noise leaves in the known inputs, relative to their size."""
        of_weight, of_bias = layer.noise
        if not of_weight and not of_bias:
            return 0.0
        size, told = float(self.inputs.square().mean().sqrt()), self.energy[self.known & (self.energy > 0)]
        if not size or not len(told):
            return math.inf
        return math.hypot(of_weight / size / float(told.min().sqrt()), of_bias / float(layer.bias_update.norm()))


def _with_dark_pixels(layer: LinearLayer, sent: Tensor) -> Tensor:
    """Return 1 where a number was sent (m, n), and for an entry of the input that is 0 and so left none in any row.

    That a random mask left out all of a column is out of the question where there are enough rows.
    """
    rows, none = sent.any(1), ~sent.any(0)
    share = 1 - float(sent[rows][:, ~none].mean()) if bool(rows.any() and none.any()) else 0.0
    if layer.masked or not share > 0 or share ** int(rows.sum()) > SENT_FOR_CERTAIN:
        return sent
    return torch.where(none, 1.0, sent) if leaves_out_at_random(layer.view, [layer.parameter_names[0]]) else sent


def _weakest_gap(update: Tensor, signal: Tensor) -> Tensor:
    """Return the largest signal (n,) beside which an entry of the input left a zero in the update (m, n).

    The entry times that signal was no more than what is left out.
    """
    return ((update == 0) * signal.abs()[:, None]).amax(0)


def _determined_inputs(sent: Tensor, heard: Tensor, signal: Tensor) -> tuple[Tensor, Tensor]:
    """Return which entries of the input (n,) follow from what was sent, and 1 where the signal (m,) does.

    An entry of the bias that was sent gives its neuron's signal; an entry of the weight then gives the pixel that it
    belongs to, and a pixel that is known the signal of a further neuron. What no such chain reaches has a free factor.

    Args:
        sent: 1 where an entry of the weight was sent (m, n).
        heard: where the bias was (m,).
        signal: into the layer (m,); neurons of next to none tell nothing.
    """
    loud = (signal.square() > 1e-6 * signal.square().sum()).to(sent)
    rows = heard.to(sent) * loud
    while True:
        columns = (rows @ sent > 0).to(sent)
        reached = torch.maximum(rows, (sent @ columns > 0).to(sent) * loud)
        if torch.equal(reached, rows):
            return columns > 0, rows
        rows = reached


def _ratio_or_zero(top: Tensor, bottom: Tensor) -> Tensor:
    """Return `top / bottom`, zero where nothing was sent."""
    return torch.where(bottom > 0, top / bottom.where(bottom > 0, torch.ones_like(bottom)), torch.zeros_like(top))


def _is_within_range(layer: LinearLayer, inputs: Tensor) -> bool:
    """Return whether the input (n,) is about what pixels in [0, 1] are."""
    return bool(_within_pixel_range(layer, inputs[None], FAR_OUTSIDE).all())


def _within_pixel_range(layer: LinearLayer, inputs: Tensor, slack: float) -> Tensor:
    """Return which of the inputs (N, n) are pixels in [0, 1]."""
    pixels = layer.to_pixels(inputs).flatten(1)
    return (pixels.amin(1) >= -slack) & (pixels.amax(1) <= 1 + slack)


def _why_size_is_unknown(view: ServerView) -> str:
    """Return why no image of several can be checked by how long the gradient is that it leaves."""
    defense = view.client.defense
    changed = any(overrides(defense, hook) for hook in ("surrogate", "gradient"))
    by = f", as the defense {defense.name} changes the update" if changed else " (clipping, say)"
    return f"the size of the gradient is not known exactly{by}, so no image could be checked"


def _obstacle(view: ServerView, layer: LinearLayer) -> str | None:
    """Return why the images of a batch can't be told apart and checked, or None."""
    if view.batch_size is None:
        return "the number of images is unknown"
    if not view.batch_size:
        return "no image was fed"
    if layer.steps != 1:
        return "several images take one local step"
    if not layer.is_given_images:
        several = len(view.task.inputs.parts) > 1
        return f"{layer.name!r} is not given {'all inputs, as batches of several take' if several else 'the image'}"
    if layer.masked:
        return f"numbers of the weight of {layer.name!r} take no part (pruned, say): no ratio of all is a picture"
    if (reason := ObservedUpdate(view).altered(*layer.parameter_names)) is not None:
        return reason
    if view.private or not view.method.uses_labels:
        return "what flows back can't be computed: the network above the layer is private"
    if layer.possible_labels() is None:
        said = "several examples are told apart by trying the targets that each may have"
        if view.labels is not None:
            return f"{said}, of which there are few under classes alone: try spear, which takes those that are known"
        return (
            f"{said}, which under {view.task.loss.name} are too many or any numbers: audit one example in an update "
            "(--batch-size 1), or try ig"
        )
    return None
