"""Why that nothing was proved of an update does not mean that nothing is there: what keeps a screening undecided."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from attacks.analytic.compressed_layer import Reading, is_on_grid
from attacks.base import NotApplicable, Reconstruction, Remark, Result
from attacks.network.normalization_modes import normalization_mode
from attacks.update.example_count import count_examples
from attacks.update.first_linear_layer import LinearLayer, first_linear
from attacks.update.float_rounding import is_sent_in_float8
from attacks.update.update_matrices import update_matrices
from attacks.update.update_rule import guess_update_rule, hides_behind_signs
from attacks.verification.nearly_told import MAX_NEARLY, MOST_ALIKE_ROWS
from eval.audit.recorded_update import TrainingFacts
from eval.audit.update_sanity import missing_share, zeros_of_unknown_cause
from eval.federations.exposures import layers_of_one_direction
from eval.federations.other_facts import FIRST_ATTACK, SEVERAL_STEPS
from eval.federations.stated_facts import unknown_facts
from fl.tensors import LowRank, dense
from fl.view import ServerView

NOT_AS_STATED = (
    "nobody can say what it shows: what a layer was given stands in its update exactly, and training as stated makes "
    "another update of that; state how the client trained (optimizer, lr, weight decay, steps, loss{}), or send all "
    "tensors in the same numbers, where some were rounded to fewer digits"
)
"""Why that nothing is proved of an update means nothing."""
NORMALIZED_IN = ", and train_mode: batch normalization counts as in {} mode"
"""What to state beside that of a network that has some."""
ANOTHER_LOSS = (
    "nobody can say what it shows: examples were found of which one step makes all of the update under another loss "
    "than stated ({}), or with soft targets or weights of examples; state the loss that the client trained with"
)
"""Likewise where the rest of training is as stated."""
NOT_ASKED = (
    "nobody can say what it shows: what explains a layer's update exactly was found, and whether one step on it makes "
    "the rest can't be asked, since nothing tells the targets under this loss ({}); audit the recorded file with them"
)
"""Likewise where targets are no classes."""
NEARLY_ONE_INPUT = (
    "nobody can say what it shows: all but {:.1g} of a layer's update is that of one input, as where a client computed "
    "in half precision, took further steps or added little noise, and nothing confirms how near that comes"
)
"""Why nothing is proved of what is all but there."""
UNCHECKED = (
    "nobody can say what it shows: what was found could not be held to the update within the time there is ({}): give "
    "more (seconds)"
)
"""Why nothing is proved of what nobody has checked."""
UNCOMPARED = (
    "nobody can say what it shows: what was found explains the layers that are known, and the network does not run on "
    "other pictures, so that nobody can tell which of these it confuses with it ({})"
)
"""Likewise where others can't be tried."""
COMPRESSED = (
    "nobody can say what it shows: {}. Who knows how it was made may find examples by a search: state that, or "
    "audit the recorded file by hyperleak audit update"
)
"""Likewise of an update that the attacks of a screening do not read."""
MORE_THAN_STATED = (
    "nobody can say what it shows: the update of {!r} is made of {} inputs at least, and {} were stated. Control "
    "variates, momentum kept from earlier rounds and further examples add such: take off what is known of these, or "
    "state the examples, and screen the rest"
)
"""Likewise where more went into it than one step as stated."""
ONE_DIRECTION = (
    "nobody can say what it shows: the update of {!r} is that of one input, which it tells up to a factor, and nothing "
    "confirms it, as where biases did not come back"
)
"""Likewise where a layer's weights alone give away its input."""
FEW_ROWS = (
    "nobody can say what it shows: {} of the {} rows of {!r} came back changed, and of one example each row is what "
    "that layer was given, up to a factor; nothing confirms it"
)
"""Likewise where rows were sent alone, which are of one direction whatever the layer was given."""
SEVERAL_STEPS_ON_ONE = (
    "nobody can say what it shows: all but {:.1g} of the update of {!r} has one direction, which what that layer was "
    "given of the one example in each of {} steps decides, and nothing confirms how near it comes"
)
"""Likewise where steps were taken on one example that no attack follows back to the first."""
BIASES_ALONE = (
    "nobody can say what it shows: {}, whose {} numbers are as many as those of the one example ({}) or more; they may "
    "be solved for by a search: audit the recorded file by hyperleak audit update"
)
"""Likewise where no weight moved, from which attacks of a screening begin."""
UNCLEAR_ZEROS = (
    "{:.0%} of the numbers of {!r} are zero here and there. As many examples, those of all steps counted, may leave "
    "such zeros; numbers that were left out look so, too, and the attacks of a screening read nothing of the others"
)
"""What is said of zeros whose cause can't be told."""
FEW_BIASES = "{}: {} numbers, and an example has {}"
"""What is said where biases alone tell something that are too few to tell an example."""
CAME_BACK_ALONE, MOVED_ALONE = "biases alone came back", "biases alone moved, since the weights came back as they were"
"""What is said of the weights beside them."""
TRAINING_UNKNOWN = (
    "nobody can say what it shows: it is that of one example, and how the client trained is not known; say {}"
)
"""Likewise where no layer's equations can be held against it."""


def find_doubt(
    facts: TrainingFacts,
    view: ServerView,
    found: Mapping[str, Result],
    reading: Reading,
    *,
    guessed: Mapping[str, Result] | None = None,
    whole: bool = True,
    inputs_matter: bool = True,
) -> str:
    """Return why that nothing is proved of an update does not mean that nothing is there; "" for no reason.

    Args:
        facts: of training, as stated.
        view: of the update under them.
        found: what each attack came to.
        reading: of the update as a compressed one.
        guessed: what attacks came to under facts that nobody stated. What they explain would be proved, so that what
            could not be checked counts; whatever else they leave open is no news of an update that is not so.
        whole: whether all weights that are trained came back; else nothing is known of the layers above some.
        inputs_matter: whether an update may not give away what a layer takes.
    """
    return (
        (_doubt_of_results(found, view) if whole else _doubt_of_nearly(found, view))
        or _doubt_of_unchecked({**found, **(guessed or {})})
        or _doubt_of_form(view, reading)
        or _doubt_of_facts(facts, view, inputs_matter)
    )


def unread_form(view: ServerView) -> str:
    """Return of what form an update is that the attacks of a screening do not read, in words; "" for none."""
    if is_sent_in_float8(view):  # whose rounding looks like the rest
        return f"its numbers were sent in {view.sent_as}, which leaves a digit of each at most"
    if rule := guess_update_rule(view):
        return f"it looks like {rule}"
    if view.threat.knows_optimizer and hides_behind_signs(view):  # which lie on a grid, too
        return "it is signs alone, or as good as (an optimizer's first step, say)"
    if is_on_grid(view):  # rounding to zero leaves numbers out, too
        return "its numbers were sent in few bits"
    share = missing_share(view)
    return f"{share:.0%} of its numbers were left out here and there" if share else ""


def unclear_zeros(view: ServerView) -> str:
    """Return that an update has zeros of which nobody can tell whether they were left out; "" for none."""
    name, share = zeros_of_unknown_cause(view)
    return UNCLEAR_ZEROS.format(share, name) if name else ""


def unread_parts(view: ServerView) -> str:
    """Return which parts of an update came back alone that the attacks of a screening do not read; "" for none."""
    moved = _biases_alone(view)
    return FEW_BIASES.format(_say_alone(view), moved, math.prod(view.task.input_shape)) if moved else ""


def _doubt_of_form(view: ServerView, reading: Reading) -> str:
    """Return that an update of one example is of a form that the attacks of a screening do not read."""
    if isinstance(reading, NotApplicable):
        return COMPRESSED.format(reading.reason)
    form = (unread_form(view) or unclear_zeros(view)) if view.batch_size == 1 else ""
    return COMPRESSED.format(form) if form else ""


def _doubt_of_facts(facts: TrainingFacts, view: ServerView, inputs_matter: bool) -> str:
    """Return that more went into the update than was stated, or that too little was."""
    stated = facts.examples or facts.batch_size
    length = facts.epochs if facts.steps is None else facts.steps
    if stated is not None and length is not None and (more := _doubt_of_rank(view, stated * length)):
        return more
    if inputs_matter and length in {1, None} and view.batch_size == 1 and (name := _one_direction(view)):
        return ONE_DIRECTION.format(name)
    if stated == 1 and inputs_matter and (few := _doubt_of_parts(view, length)):
        return few
    if stated == 1 and length in {1, None} and not view.threat.knows_optimizer:
        return TRAINING_UNKNOWN.format(unknown_facts(facts))
    return ""


def _doubt_of_rank(view: ServerView, fed: int) -> str:
    """Return that the update of the first linear layer is made of more inputs than were fed; "" for no more."""
    sides = [min(v.shape) for v in view.update.values() if not isinstance(v, LowRank) and v.ndim == 2]
    told = max(sides, default=0) > fed and not unread_form(view)  # a smaller matrix could not tell
    layer = first_linear(view) if told else None
    if not isinstance(layer, LinearLayer):
        return ""
    alone = replace(view, update={name: view.update[name] for name in layer.parameter_names})
    count = count_examples(alone)
    return MORE_THAN_STATED.format(layer.name, count, fed) if count is not None and count > fed else ""


def _one_direction(view: ServerView) -> str:
    """Return the name of a matrix whose update is of rank one, and of more than two rows; "" for none."""
    if not view.threat.knows_optimizer or unread_form(view):
        return ""
    for matrix in update_matrices(view):
        alone = replace(view, update={matrix.name: view.update[matrix.name]})
        rows = int(matrix.moved.flatten(1).any(1).sum())
        if matrix.moved.ndim == 2 and rows > MOST_ALIKE_ROWS and count_examples(alone) == 1:
            return matrix.name
    return ""


def _doubt_of_parts(view: ServerView, length: int | None) -> str:
    """Return that the update of one example tells what a layer was given, nearly or as far as it was sent."""
    numbers = math.prod(view.task.input_shape)
    if (moved := _biases_alone(view)) >= numbers:
        return BIASES_ALONE.format(_say_alone(view), moved, numbers)
    for matrix in (one for one in update_matrices(view) if one.moved.ndim == 2):
        height, rows = len(matrix.moved), int(matrix.moved.any(1).sum())
        if rows <= MOST_ALIKE_ROWS < height and length == 1 and view.threat.knows_optimizer:
            return FEW_ROWS.format(rows, height, matrix.name)
        if rows > MOST_ALIKE_ROWS and length not in {1, None}:
            sizes = torch.linalg.svdvals(matrix.part().moved)
            left = float(sizes[1:].norm() / sizes.norm())
            return SEVERAL_STEPS_ON_ONE.format(left, matrix.name, length) if left <= MAX_NEARLY else ""
    return ""


def _biases_alone(view: ServerView) -> int:
    """Return how many numbers of biases moved where no other did; 0 where another did, or none."""
    moved = [dense(value) for value in view.update.values() if bool(dense(value).any())]
    return sum(int((value != 0).sum()) for value in moved) if all(value.ndim == 1 for value in moved) else 0


def _say_alone(view: ServerView) -> str:
    """Return whether biases that tell something alone came back with weights that did not move, or without any."""
    return MOVED_ALONE if any(dense(value).ndim > 1 for value in view.update.values()) else CAME_BACK_ALONE


def _doubt_of_results(found: Mapping[str, Result], view: ServerView) -> str:
    """Return that attacks found something which the facts as stated do not explain."""
    if other := [name for name, result in found.items() if _is_of_another_loss(result, view)]:
        return f"{ANOTHER_LOSS.format(view.task.loss.name)} ({other[0]})"
    if contradicted := [name for name, result in found.items() if contradicts_facts(result, view)]:
        mode = normalization_mode(view)
        return f"{NOT_AS_STATED.format(NORMALIZED_IN.format(mode) if mode else '')} ({contradicted[0]})"
    if unasked := [name for name, result in found.items() if _is_unasked(result, view)]:
        return f"{NOT_ASKED.format(view.task.loss.name)} ({unasked[0]})"
    return _doubt_of_nearly(found, view)


def _doubt_of_nearly(found: Mapping[str, Result], view: ServerView) -> str:
    """Return that one input is nearly all of a layer's update."""
    asked = (found.get(name) for name in (FIRST_ATTACK, SEVERAL_STEPS))
    first = next((one for one in asked if isinstance(one, Reconstruction)), None)
    if view.batch_size != 1 or first is None or first.verified or not first.objective <= MAX_NEARLY:
        return ""
    layer = first_linear(view)
    if isinstance(layer, NotApplicable) or layer.name in layers_of_one_direction(view):
        return ""
    return NEARLY_ONE_INPUT.format(first.objective)


def _doubt_of_unchecked(found: Mapping[str, Result]) -> str:
    """Return that an attack found what nobody had the time to check."""
    results = {name: result for name, result in found.items() if isinstance(result, Reconstruction)}
    for remark, words in ((Remark.UNCHECKED, UNCHECKED), (Remark.UNCOMPARED, UNCOMPARED)):
        for name, one in results.items():
            if one.verified is None and remark in one.remarks:
                return words.format(name)
    return ""


def contradicts_facts(result: Result, view: ServerView) -> bool:
    """Return whether an attack found what one layer is exactly given, and training as stated makes another update.

    A layer of which two outputs move, or fewer, is explained by one input whatever it was given.
    """
    if isinstance(result, NotApplicable) or result.verified is not False or Remark.CONTRADICTED not in result.remarks:
        return False
    return not _has_one_direction(view)


def _is_unasked(result: Result, view: ServerView) -> bool:
    """Return whether an attack found what one layer is exactly given, and nobody can ask the rest of the update."""
    return isinstance(result, Reconstruction) and Remark.UNASKED in result.remarks and not _has_one_direction(view)


def _is_of_another_loss(result: Result, view: ServerView) -> bool:
    """Return whether an attack found what makes the whole update if the client's loss was another than stated."""
    return isinstance(result, Reconstruction) and Remark.OTHER_LOSS in result.remarks and not _has_one_direction(view)


def _has_one_direction(view: ServerView) -> bool:
    """Return whether the first linear layer is explained by one input whatever it was given."""
    layer = first_linear(view)
    return not isinstance(layer, NotApplicable) and layer.name in layers_of_one_direction(view)
