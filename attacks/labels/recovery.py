"""Labels from the update alone."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from attacks.labels.counts import map_counts
from attacks.update.classifier_update import (
    SIGN_WARNING_NO_LABELS,
    classifier_names,
    classifier_tensors,
    is_update_sign_flipped,
)
from attacks.update.observed_update import ObservedUpdate
from attacks.update.training_phases import adaptive_optimizer_obstacle, deviation_from_loss_gradient, training_phases
from fl.defense import overrides
from fl.seeds import stream
from fl.tensors import Tensors, add, dense
from fl.view import ServerView

PROBES = 64
"""Images of noise that tell what the features look like."""
ALTERNATIONS = 15
RIDGE = 0.05
"""Pull of a class's mean feature towards its last estimate, as a share of what the gradient says of it."""
SIZES = 24
"""Sizes tried for a gradient of which only the direction is known."""
WHOLE = 0.1
"""How far a number of images that was told may be off a whole one."""
APART = 0.5
"""How far predictions of images of one class are taken to lie apart, as a share of how far those of classes do."""
POINTS = 16
"""Interpolated heads between the start and the end of a round, at most."""


def idlg_label(observed: ObservedUpdate) -> Tensor | None:
    """The label of a single image (1,), or None where the view does not give it away.

    Under cross entropy the logit gradient p - y is negative for the true class alone (iDLG, Zhao et al. 2020, Eq. 3).
    It is the classifier's bias gradient; without a bias, each row of the weight gradient is it times the features, so
    the true row alone points against all others (Eq. 4, which needs no sign of the features). Of two rows each points
    against the other, so two classes can't be told apart like this. An optimiser that divides every number by a size
    of its own (Adam) keeps the signs and no sizes: then one entry must be negative, and one only.

    Args:
        observed: the update of one image in one or more steps.
    """
    view, update = observed.view, observed.change
    if view.batch_size != 1:
        return None
    weight, bias = classifier_tensors(view, update)
    normalised = adaptive_optimizer_obstacle(training_phases(view)[0]) is not None
    if bias is not None:
        if normalised and int((bias < 0).sum()) != 1:  # no size tells which of several it is
            return None
        return bias.argmin().view(1) if bool(bias.any()) else None
    if weight is None:
        return None
    against = ((weight @ weight.mT) < 0).sum(1)
    most = (against == against.max()).nonzero().flatten()
    return most if len(most) == 1 else None


def recover_labels(observed: ObservedUpdate) -> Tensor | None:
    """The labels of all images (N,), in ascending order, or None where the view does not give them away.

    One image: the iDLG rule. Several: with n_k of N images in class k, the bias's gradient is g_k = mean p_k - n_k / N
    (Geng et al. 2021; LLG, Wainakh et al. 2022), which for known mean predictions p counts the classes, and shows by
    its sign alone that a class is there. A prediction differs by class: P_c = softmax(W h_c + b) at the class's mean
    feature h_c, which its row of the weight gradient over that of the bias gives roughly (Ma et al. 2023). Here counts
    and features are then fitted in turn: counts n to g = sum of n_c / N (P_c - e_c) in whole numbers, features to
    gW = sum of n_c / N (P_c - e_c) h_c^T, not negative where the network's features on noise are not. Without a bias,
    rows of gW in the direction of the features of noise stand for g.

    How near to g the counts have to come depends on how well all this holds. Images of a class are taken to differ in
    their predictions half as far as classes do: not at all in an untrained network, a lot in a trained one, where g is
    that of the few images that are mistaken. To this is added what the last fit left. Before the update, every image is
    taken to be of any class with equal chance, or, far less likely, a client's classes to come in any numbers
    (`counts.surprise`); what the last fit makes the likeliest by both is returned: where the gradient says nothing,
    every class as often. That is an assumption: shares of classes are not known to a server. What follows from signs
    holds whatever is assumed.

    After several steps the sum of their gradients is seen, weighted by momentum; P is the mean over networks on the
    line from the one sent to the one returned (after Dimitrov et al. 2022), where class features drift as those of
    noise do, and images count as used equally often. Where clipping hides the size of the gradient, its direction is
    fitted, and nothing is expected of the counts. A group of clients is left alone if an image of one counts for more
    in their mean than an image of another, or if what each client sends is of a size that does not tell: clipping gives
    every client a factor of its own.

    Of an optimiser that divides every number by its own size (Adam) a first step tells labels that all differ.

    Where clients tell the shares of their labels themselves (FedGen), these are the answer, if they come to whole
    images. If a defence has changed them they do not, and then the gradient is asked where it is of the images alone.

    Threat model: an honest server with the classifier, its update and the number of images; without a bias the whole
    network.

    Args:
        observed: the update of a known number of images.
    """
    view, update = observed.view, observed.change
    told = view.method.told_labels(view.shared, update)
    if told is not None and view.batch_size is not None:
        if (counts := _whole(view, told, view.batch_size)) is not None:
            return torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        if not view.method.plain_loss(view.client.task, view.round):
            return None  # other features than the images' are in the classifier's gradient
    if view.batch_size == 1:
        moved = (
            any(name.startswith("memory/") for name in view.private) and deviation_from_loss_gradient(view) is not None
        )
        # what is remembered may outweigh the loss in the bias
        return None if moved or is_update_sign_flipped(view, update) else idlg_label(observed)
    if adaptive_optimizer_obstacle(training_phases(view)[0]) is not None:
        return _by_signs(view, update)
    head = _Head.of(observed)
    if head is None or view.batch_size is None:
        return None
    counts = head.counts(view.batch_size)
    return torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts.long())


def fixed_labels(view: ServerView, rule: str) -> Tensor | None:
    """The labels a search takes as given: known ones, else read off the classifier's update, else None.

    Those read off are in ascending order: they are not those of the images one by one where
    `attacks.labels.assignment.order_matters`.

    Args:
        view: the server's.
        rule: "auto" as above; by any other they are searched for unless they are known.
    """
    if not view.method.uses_labels:
        return torch.zeros(view.batch_size or 1, dtype=torch.int64, device=view.device)
    if view.labels is not None:
        return view.labels
    if overrides(view.client.defense, "transform_batch"):
        return None  # what is fed is known to be changed, labels with it: those read off would be whole ones
    return recover_labels(ObservedUpdate(view)) if rule == "auto" else None


def single_label(view: ServerView) -> tuple[Tensor | None, str]:
    """The label (1,) of a view of one image, known or read off its update, and what is to be noted of it."""
    odd = view.labels is None and is_update_sign_flipped(view, ObservedUpdate(view).change)
    return fixed_labels(
        view, "auto"
    ) if view.method.uses_labels and not odd else None, SIGN_WARNING_NO_LABELS if odd else ""


def _by_signs(view: ServerView, update: Tensors) -> Tensor | None:
    """The labels (N,) of as many images as the bias of the classifier has negative entries; None of other numbers.

    The first step of an optimiser that divides every number by its own size shows the signs of the gradient, and a
    class is negative only if an image is of it. Further steps mix.
    """
    bias = classifier_tensors(view, update)[1]
    steps = [step for steps in training_phases(view)[1] or () for step in steps]
    plain = deviation_from_loss_gradient(view) is None and view.method.plain_loss(view.client.task, view.round)
    if bias is None or len(steps) != 1 or not plain or overrides(view.client.defense, "transform_update"):
        return None
    negative = (bias < 0).nonzero().flatten()
    return negative if len(negative) == view.batch_size == sum(steps[0]) else None


def _whole(view: ServerView, shares: Tensor, images: int) -> Tensor | None:
    """Shares of labels (K,) as numbers of images (K,) int64; None where they are none, or of several clients.

    Shares are of what the first phase is fed. Images that later phases change (augmentation) count anew, in the same
    shares only where these phases go through the whole data.
    """
    counts = (shares.double() * images).round()
    off = float((shares.double() * images - counts).abs().max())
    if view.scaled or view.parts or not off <= WHOLE or float(counts.min()) < 0 or float(counts.sum()) != images:
        return None
    if view.schedule is None or images % sum(map(sum, view.schedule[0])):
        return None
    return counts.long()


@dataclass(frozen=True)
class _Head:
    """A linear classifier's mean gradient over a round, in float64.

    Attributes:
        weight: gradient (K, d).
        bias: gradient (K,), or what stands for it.
        heads: weights (T, K, d) and biases (T, K) along the round, and how much each counts (T,).
        noise: features of noise along the round (T, M, d), or None where the network is not known.
        sent: where a known defence let the bias through (K,) bool.
        exact: whether the bias is a mean over the images to rounding, so that its signs are proofs.
        sized: whether the gradient's size is known.
    """

    weight: Tensor
    bias: Tensor
    heads: tuple[Tensor, Tensor, Tensor]
    noise: Tensor | None
    sent: Tensor
    exact: bool
    sized: bool

    @classmethod
    def of(cls, observed: ObservedUpdate) -> _Head | None:
        """From an update without decay, or None where it says nothing of labels."""
        view, update = observed.view, observed.change
        name, bias_name = classifier_names(view, update)
        plain = deviation_from_loss_gradient(view) is None and view.method.plain_loss(view.client.task, view.round)
        if name is None or not plain or name not in view.shared:
            return None
        spread = _spread(view, name)
        if spread is None:
            return None
        lr, shares, clipped = spread
        hooks = [overrides(view.client.defense, hook) for hook in ("gradient", "surrogate", "transform_update")]
        sized = not (clipped or view.scaled or hooks[0] or hooks[1])
        if view.parts and not (sized and _even(view, name, float(shares.sum()))):
            return None
        whole = float(shares.sum()) * lr
        weight = dense(update[name]).double() / whole
        start = dense(view.shared[name]).double()
        marks = torch.linspace(0, 1, len(shares) + 1, dtype=torch.float64)[:-1].tolist()
        noise = _features(view, name.removesuffix(".weight"), marks)
        if bias_name is not None:
            bias = dense(update[bias_name]).double() / whole
            offset = dense(view.shared[bias_name]).double()
        elif noise is not None and bool(noise.any()):
            mean = noise.mean((0, 1))
            bias, offset = weight @ mean / (mean @ mean), start.new_zeros(len(start))
        else:
            return None
        heads = torch.stack([start - weight * whole * t for t in marks])
        offsets = torch.stack([offset - (bias * whole * t if bias_name else 0 * bias) for t in marks])
        sent = torch.ones_like(bias, dtype=torch.bool) if bias_name is None else observed.transmitted(bias_name)
        # the fit multiplies four of them: no gradient of images is so large that this overflows
        parts = (bias, weight, start, offset) if noise is None else (bias, weight, start, offset, noise)
        sane = all(bool(part.square().square().sum().isfinite()) for part in parts)
        if not bool(sane and bias.any() and sent.any()):
            return None
        exact = sized and bias_name is not None and len(shares) == 1 and not any(hooks)
        weights = (shares / shares.sum()).to(start)
        return cls(weight, bias, (heads, offsets, weights), noise, sent, exact, sized)

    def counts(self, images: int) -> Tensor:
        """Images of each class (K,), whole numbers that add up to `images`."""
        signs = (-images * self.bias - 1e-3).ceil().clamp_min(0) if self.exact else torch.zeros_like(self.bias)
        if float(signs.sum()) > images:  # then something is not as it was taken to be: prove nothing
            signs = torch.zeros_like(signs)
        return self._alternate(images, signs)

    def predictions(self, features: Tensor) -> Tensor:
        """Mean softmax (M, K) over the round at features (M, d), which drift as those of noise do."""
        return (self._course(features) * self.heads[2][:, None, None]).sum(0)

    def _course(self, features: Tensor) -> Tensor:
        """Softmax (T, M, K) along the round at features (M, d)."""
        weights, biases, shares = self.heads
        if self.noise is not None:
            centres = self.noise.mean(1, keepdim=True)
            features = features + centres - (centres * shares[:, None, None]).sum(0)
        return (features @ weights.mT + biases[:, None]).softmax(-1)

    def _doubt(self, features: Tensor, images: int) -> float:
        """Mean square by which the gradient may be off: as predictions at `features` differ, by class and in time.

        By one over the images for those of a class, which are drawn, and by one over the classes for the mean of a
        class, which is guessed.
        """
        course = self._course(features)
        apart = (course - self.predictions(features).mean(0)).square().mean((1, 2))
        return APART**2 * float(apart @ self.heads[2]) * (1 / images + 1 / course.shape[1])

    def _alternate(self, images: int, least: Tensor) -> Tensor:
        """Counts and mean features in turn, from the row ratios: the last, or of a direction those that leave least."""
        g, rows = self.bias, self.weight
        positive = self.noise is not None and float(self.noise.min()) >= -0.05 * float(self.noise.abs().max())
        low = 0.0 if positive else -float("inf")
        damp = 1e-3 * g.square().mean()
        features = (g[:, None] * rows + damp * (g @ rows) / (g @ g)) / (g.square() + damp)[:, None]
        features = features.clamp_min(low)
        longest = 10 * features.norm(dim=1).median().clamp_min(1e-300)
        counts, missed, best, fewest = least, 0.0, least, float("inf")
        for _ in range(ALTERNATIONS):
            predictions = self.predictions(features)
            # a direction alone is fitted as it is: beside the freedom of its size a doubt leaves it too little to say
            doubt = self._doubt(features, images) + missed if self.sized else 0.0
            counts, left = self._fit(predictions, images, least, doubt)
            signals = (predictions - torch.eye(len(g)).to(g)) * (counts / images)[:, None]
            missed = left**2 * float(g[self.sent].square().mean())
            there = counts > 0
            sent = self._scale(signals.sum(0)) * signals[there].mT
            solved = self._solved(sent, features[there]).clamp_min(low)
            left += float((sent @ solved - rows).norm() / rows.norm())
            if left < fewest:
                best, fewest = counts, left
            long = solved.norm(dim=1, keepdim=True) / longest  # a class predicted surely sends next to nothing back
            features = features.clone()
            features[there] = solved / long.clamp_min(1)
        return counts if self.sized else best

    def _scale(self, made: Tensor) -> float:
        """Factor that brings what is predicted, `made` (K,) of the bias, to the update's size."""
        return 1.0 if self.sized else max(float((made @ self.bias) / made.square().sum().clamp_min(1e-300)), 0.0)

    def _solved(self, signals: Tensor, features: Tensor) -> Tensor:
        """Mean features (C, d) of classes that send `signals` (K, C), near their last estimate."""
        pull = (RIDGE * signals.square().sum(0).mean()).sqrt() * torch.eye(signals.shape[1]).to(signals)
        return torch.linalg.lstsq(torch.cat([signals, pull]), torch.cat([self.weight, pull @ features])).solution

    def _fit(self, predictions: Tensor, images: int, least: Tensor, doubt: float) -> tuple[Tensor, float]:
        """Whole counts >= `least` (K,) that explain the bias best, class c predicting as row c, and what is left.

        `doubt` is the mean square by which a bias may be off, for those whose size is known; nothing is expected of the
        counts where it is 0.
        """
        signals = (predictions.mT - torch.eye(len(predictions)).to(predictions))[self.sent] / images
        target = self.bias[self.sent]
        if self.sized:
            counts = map_counts(signals, target, images, least, doubt)
            return counts, float((signals @ counts - target).norm() / target.norm())
        best, least_left = least, float("inf")
        for size in torch.logspace(-5, 0, SIZES, base=2, dtype=torch.float64).tolist():
            # no class has more than all images: the bias's lowest entry can't lie below -1
            counts = map_counts(signals, target * (size / float(-target.min())), images, least)
            made = signals @ counts
            left = float((made / made.norm() - target / target.norm()).norm())
            if left < least_left:
                best, least_left = counts, left
        return best, least_left


def _spread(view: ServerView, name: str) -> tuple[float, Tensor, bool] | None:
    """Step size, the weight of each (of up to `POINTS`) steps' gradient in the update, and whether steps are clipped.

    None where the classifier does not move in one phase of SGD.
    """
    phases, schedule = training_phases(view)
    if schedule is None:
        return None
    moving = [(p, s) for p, s in zip(phases, schedule, strict=True) if s and name in p.assign({name: 0})]
    if len(moving) != 1 or moving[0][0].optimizer != "sgd":
        return None
    phase, steps = moving[0]
    group = phase.assign({name: 0})[name]
    if group.lr == 0:
        return None
    after = torch.arange(len(steps), 0, -1, dtype=torch.float64)  # steps a gradient acts in, its own included
    shares = (1 - phase.momentum**after) / (1 - phase.momentum)
    if phase.nesterov:
        shares = 1 + phase.momentum * shares
    points = [part.sum() for part in shares.tensor_split(min(len(shares), POINTS))]
    return group.lr, torch.stack(points), group.max_norm is not None


def _even(view: ServerView, name: str, whole: float) -> bool:
    """Whether images of all clients of a group count alike; `whole` is the sum of all weights in the group's spread."""
    for part in view.parts:
        own = _spread(replace(view, parts=(), schedule=part.schedule), name)
        counted = 0.0 if own is None else part.weight * float(own[1].sum()) / whole
        if abs(counted - (part.batch_size or 0) / (view.batch_size or 1)) > 1e-6:
            return False
    return True


def _features(view: ServerView, layer: str, marks: list[float]) -> Tensor | None:
    """What the classifier `layer` is given for images of noise (T, M, d); None where part of the network is private.

    `marks` are shares in [0, 1) of the way from the weights sent to those returned, one per row.
    """
    if view.private:
        return None
    model = copy.deepcopy(view.client.predictor)
    seen: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(args[0])

    model.get_submodule(layer).register_forward_pre_hook(note)
    images = torch.rand(PROBES, *view.task.input_shape, generator=stream(0, "labels"))
    images = images.to(device=view.device, dtype=view.dtype)
    moved = {name: value for name, value in view.update.items() if name in view.shared}
    for mark in marks:
        now = {**view.shared, **{name: add(view.shared[name], value, -mark) for name, value in moved.items()}}
        state = {**view.client.network(now, {}).weights, **view.client.task.buffers, **view.buffers}
        with torch.no_grad():
            functional_call(model, state, (images,))
    return torch.stack(seen).double() if len(seen) == len(marks) and seen[0].ndim == 2 else None
