"""The gradient that a client's one local step was taken along, as far as its update gives it away."""

from __future__ import annotations

from attacks.result import NotApplicable
from attacks.update.observed_update import ObservedUpdate
from attacks.update.training_phases import deviation_from_loss_gradient, training_phases
from attacks.update.update_rule import RuleKind, kind_of_update_rule
from fl.defense import overrides
from fl.parametrization import Parametrization
from fl.tensors import Tensors
from fl.view import ServerView

CENTRALIZED = (
    "the update looks like one of centralized gradients: each filter's and each row's mean was taken off, and with it "
    "an equation of each, so that inputs do not follow from single layers"
)
OF_ONE_CENTRALIZED = "; analytic reads what a first linear layer is given, less its mean"
OF_SEVERAL_CENTRALIZED = (
    "; no attack here takes those of several examples: audit a step without that, or of one example"
)


def single_step_obstacle(view: ServerView, *, batches: bool = False) -> str | None:
    """Return why the classifier can't be cut off, or None.

    With `batches`, telling a batch's images apart is left to the attack.
    """
    if not view.update:
        return "nothing is shared"
    if (reason := deviation_from_loss_gradient(view)) is not None:
        return reason
    if type(view.method.parametrization) is not Parametrization:
        return "the network's weights are generated: peel it first"
    if overrides(view.defense, "wrap_model"):
        return f"the defense {view.defense.name} puts layers of its own into the network"
    steps = [step for steps in training_phases(view)[1] or () for step in steps]
    if len(steps) != 1:
        several = "it takes one local step: where several are short, `first-step` works out the first"
        return several if view.schedule is not None else "the number of local steps is unknown"
    if sum(steps[0]) != 1 and not batches:
        return "it takes a batch of one: the signals of several images are summed in the bias gradient"
    if view.batch_size not in {None, sum(steps[0])}:
        one = "one image" if not batches else "as many images as the step's batch has"
        return f"it takes a client of {one}: which of {view.batch_size} the one step was on is unknown"
    return None


def exact_step_gradient(view: ServerView, *, batches: bool = False) -> Tensors | NotApplicable:
    """Return the gradient of a view's one step where it is known up to one factor for all tensors, or why it is not.

    Of one image, unless the caller takes `batches`.
    """
    if (reason := single_step_obstacle(view, batches=batches)) is not None:
        return NotApplicable(reason)
    if not view.client.defense.preserves_norm_ratios():
        return NotApplicable(f"the defense {view.defense.name} leaves no ratio of a weight's to a bias's update")
    if kind_of_update_rule(view) == RuleKind.CENTRALIZED:
        way = OF_ONE_CENTRALIZED if view.batch_size == 1 else OF_SEVERAL_CENTRALIZED
        return NotApplicable(CENTRALIZED + way, limit=True)
    observed = ObservedUpdate(view)
    return observed.gradient if (reason := observed.altered()) is None else NotApplicable(reason)
