"""Labels read off an update: of one image by signs, of several by fitting the classifier's gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from attacks.labels.classifier_fit import ClassifierGradient
from attacks.labels.targets import read_targets
from attacks.update.classifier_update import SIGN_WARNING_NO_LABELS, classifier_tensors, is_update_sign_flipped
from attacks.update.observed_update import ObservedUpdate
from attacks.update.training_phases import adaptive_optimizer_obstacle, deviation_from_loss_gradient, training_phases
from fl.defense import overrides
from fl.view import ServerView

MAX_FRACTION = 0.1
"""How far a number of images that a client states may be off a whole one."""
LABELS_COUNTED = "the labels are the likeliest counts of classes, which nothing in the update proves"
"""What is to be noted of labels that `are_labels_proven` does not hold for."""


def recover_labels(observed: ObservedUpdate) -> Tensor | None:
    """Return the labels of all images, or None where the update does not give them away.

    - Where clients state the shares of their labels themselves (FedGen), these are the answer, if they come to whole
      images. A defense may have changed them; then the gradient is asked, where it is of the images alone.
    - One image: `idlg_label`.
    - Several after one step of an optimizer that divides every number by its own size (Adam): the signs, which tell
      labels that all differ.
    - Several after SGD: `attacks.labels.classifier_fit` fits counts and features to the classifier's gradient. Where
      it leaves a choice, the likeliest counts are taken: every image is of any class with equal chance, or, far less
      likely, a client's classes come in any numbers (`attacks.labels.counts`). That is an assumption, as a server does
      not know the shares of classes. What follows from signs holds whatever is assumed.

    A group of clients is left alone if an image of one counts for more in their mean than an image of another, or if
    clipping gives every client a factor of its own.

    Threat model: an honest server with the classifier, its update and the number of images; without a bias the whole
    network.

    Args:
        observed: the update of a known number of images N.

    Returns:
        int64 (N,), in ascending order.
    """
    counts = label_counts(observed)
    return None if counts is None else torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)


def are_labels_proven(view: ServerView) -> bool:
    """Return whether labels that `recover_labels` reads off a view can't be others, if training was as stated.

    Those of several images are where the signs of the classifier's bias leave no choice, or clients state them.
    """
    observed, count = ObservedUpdate(view), view.batch_size
    if count == 1 or view.method.disclosed_label_shares(view.shared, observed.change) is not None:
        return True
    if adaptive_optimizer_obstacle(training_phases(view)[0]) is not None:
        return True  # signs alone are read
    gradient = ClassifierGradient.of(observed)
    return gradient is not None and count is not None and int(gradient.proven_counts(count).sum()) == count


def label_counts(observed: ObservedUpdate) -> Tensor | None:
    """Return how many images of each class there are, int64 (K,), as `recover_labels` reads them."""
    view = observed.view
    if not view.task.loss.is_cross_entropy:
        return None
    stated = view.method.disclosed_label_shares(view.shared, observed.change)
    if stated is not None and view.batch_size is not None:
        if (counts := _whole_counts(view, stated, view.batch_size)) is not None:
            return counts
        if not view.method.uses_plain_cross_entropy(view.client.task, view.round):
            return None  # other features than the images' are in the classifier's gradient
    if view.batch_size == 1:
        remembers = any(name.startswith("memory/") for name in view.private)
        if remembers and deviation_from_loss_gradient(view) is not None:
            return None  # what is remembered may outweigh the loss in the bias
        label = None if is_update_sign_flipped(view, observed.change) else idlg_label(observed)
        return _count_classes(view, label)
    if adaptive_optimizer_obstacle(training_phases(view)[0]) is not None:
        return _count_classes(view, _labels_by_signs(observed))
    gradient = ClassifierGradient.of(observed)
    if gradient is None or view.batch_size is None:
        return None
    return gradient.count_labels(view.batch_size).long()


def idlg_label(observed: ObservedUpdate) -> Tensor | None:
    """Return the label of a single image, or None where the update does not give it away.

    Under cross entropy the logits' gradient p - e_y is negative for the true class alone (iDLG, Zhao et al. 2020,
    Eq. 3). It is the classifier's bias gradient. Without a bias, each row of the weight gradient is it times the
    features, so that the true row alone points against all others (Eq. 4, which needs no sign of the features). Of two
    rows each points against the other, so two classes can't be told apart like this. An optimizer that divides every
    number by a size of its own (Adam) keeps the signs and no sizes: then one entry must be negative, and one only.
    Where no entry of the bias is (a random mask may have dropped the true class's), rows are asked likewise.

    Args:
        observed: the update of one image in one or more steps.

    Returns:
        int64 (1,).
    """
    view = observed.view
    if view.batch_size != 1:
        return None
    weight, bias = classifier_tensors(view, observed.change)
    adaptive = adaptive_optimizer_obstacle(training_phases(view)[0]) is not None
    if bias is not None:
        negative = int((bias < 0).sum())
        if adaptive and negative != 1:  # no size tells which of several it is
            return None
        if negative:
            return bias.argmin().view(1)
    if weight is None or (bias is not None and not bool(bias.any()) and observed.is_complete(*view.update)):
        return None
    against = ((weight @ weight.mT) < 0).sum(1)
    most = (against == against.max()).nonzero().flatten()
    return most if len(most) == 1 else None


def fixed_labels(view: ServerView, rule: str) -> Tensor | None:
    """Return the targets a search takes as given: known ones, else those read off the update, else None.

    Those read off are in ascending order: they are not those of the images one by one where
    `attacks.labels.assignment.order_matters`.

    Args:
        view: what the server saw.
        rule: "auto" as above; by any other they are searched for unless they are known.
    """
    if not view.method.uses_labels:
        return torch.zeros(view.batch_size or 1, dtype=torch.int64, device=view.device)
    if view.labels is not None:
        return view.labels
    if overrides(view.client.defense, "transform_batch"):
        return None  # what is fed is known to be changed, labels with it: those read off would be whole ones
    if rule != "auto":
        return None
    return recover_labels(ObservedUpdate(view)) if view.task.loss.is_cross_entropy else read_targets(view)


def single_label(view: ServerView) -> tuple[Tensor | None, str]:
    """Return the label (1,) of a view of one image, known or read off its update, and what is to be noted of it."""
    if view.labels is None and is_update_sign_flipped(view, ObservedUpdate(view).change):
        return None, SIGN_WARNING_NO_LABELS
    return fixed_labels(view, "auto") if view.method.uses_labels else None, ""


def _count_classes(view: ServerView, labels: Tensor | None) -> Tensor | None:
    return None if labels is None else torch.bincount(labels, minlength=view.task.num_classes)


def _labels_by_signs(observed: ObservedUpdate) -> Tensor | None:
    """Return the labels, if the classifier's bias has as many negative entries as there are images; else None.

    The first step of an adaptive optimizer shows the signs of the gradient, and a class is negative only if an image
    is of it. Further steps mix.
    """
    view = observed.view
    bias = classifier_tensors(view, observed.change)[1]
    steps = [step for steps in training_phases(view)[1] or () for step in steps]
    plain = deviation_from_loss_gradient(view) is None and view.method.uses_plain_cross_entropy(
        view.client.task, view.round
    )
    if bias is None or len(steps) != 1 or not plain or overrides(view.client.defense, "transform_update"):
        return None
    negative = (bias < 0).nonzero().flatten()
    return negative if len(negative) == view.batch_size == sum(steps[0]) else None


def _whole_counts(view: ServerView, shares: Tensor, images: int) -> Tensor | None:
    """Return stated shares of labels (K,) as numbers of images int64 (K,); None where they are not of one client.

    Shares are of what the first phase is fed. Images that later phases change (augmentation) count anew, in the same
    shares only where these phases go through the whole data.
    """
    counts = (shares.double() * images).round()
    off = float((shares.double() * images - counts).abs().max())
    if (
        view.scale_unknown
        or view.parts
        or not off <= MAX_FRACTION
        or float(counts.min()) < 0
        or float(counts.sum()) != images
    ):
        return None
    if view.schedule is None or images % sum(map(sum, view.schedule[0])):
        return None
    return counts.long()
