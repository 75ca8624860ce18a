"""What results are told of how they were confirmed, or why they were not."""

from __future__ import annotations

import re

from attacks.update.label_gradients import MAX_TRIED_LABELS
from fl.inputs.form import InputForm

KNOWN_TARGETS = "let the attacker know them (threat, --threat '{knows_labels: true}')"
"""How targets are stated."""
STILL = "tensors that did not move count as not trained: {}"
CONTRADICTED = (
    "not confirmed: the picture explains what it was read from, but one step of SGD on it does not make the rest of "
    "the update"
)
POSSIBLE_RULES = (
    "another loss or optimizer, weight decay in a part of the weights, clipping by tensor, step sizes by layer or "
    "group of parameters, dropout, half precision (autocast), further steps, examples or clients, an added control "
    "variate, numbers that were frozen or left out, other weights before, or a turned sign?"
)
"""What may be the reason where sizes alone do not tell."""
OTHER_MODE = "batch normalization in {} mode where the client counts as in {} mode, "
"""Likewise, before the others, of a network that normalizes by its batch, or by what it has kept, as its mode says."""
UNDER_ANOTHER_LOSS = (
    "with gradients of the outputs that the loss as stated has for none of the labels tried, one step makes all of the "
    "update, as another loss, soft targets or weights of examples make them: state the loss that was trained with"
)
LABELS_UNTRIED = (
    f"not confirmed: the label is unknown, and with none of the first {MAX_TRIED_LABELS} does one step of SGD make the "
    "update; state the labels to rely on that"
)
TARGETS_UNKNOWN = (
    "not confirmed: the targets are unknown and can't be told from the update, so nobody can ask whether one step on "
    f"the picture makes all of it; to rely on that, {KNOWN_TARGETS}"
)
ORDER_UNTOLD = (
    "not confirmed: nothing tells which example has which of the targets that are known, and in none of the orders "
    "tried does one step on the pictures make the update"
)
TARGETS_REFUSED = (
    "not confirmed: the loss function takes none of the targets that the examples may have, by themselves, so nobody "
    "can ask whether one step on the picture makes all of it"
)
BELOW_ROUNDING = (
    "not decided: the update is smaller than the rounding of weights, so that as the difference of two models it tells "
    "nothing of the picture; if it is a gradient, or a multiple of one, state that (kind='gradient', --kind gradient)"
)
RULE_UNKNOWN = (
    "not confirmed: the optimizer was not stated, and nothing in the update tells whether it was plain SGD; "
    "state it (method, --method) to rely on that"
)
ROUNDED_FURTHER = "not confirmed, nor ruled out: a miss may be no more than the rounding of what was sent in"
BORNE_OUT_AS_ROUNDED = (
    "borne out, but not confirmed to a quarter of a level: one step of SGD on it makes the update to the rounding of "
    "{}, and on others, brighter ones or ones that differ at random by {}{}, does not"
)
MORE_THAN_ROUNDING = (
    "borne out, but not confirmed to a quarter of a level: one step of SGD on it makes the update but for more "
    "than rounding, as of pictures nearly alike stated as one (then it is their mean), or of noise"
)
BEYOND_ROUNDING = (
    "not confirmed: to the rounding of the update other pictures make it as well, and what it tells beyond that is of "
    "another"
)
MEAN_OF_PICTURES = (
    "borne out, but not confirmed to a quarter of a level: its pixels lie between levels of 8 bits as those of a mean "
    "of two to four pictures do, which were stated as one"
)
PAIRS_HIDDEN = (
    "borne out, but not confirmed to a quarter of a level: it is not at levels of 8 bits, and two pictures 35 dB "
    "apart, stated as one, could make this update to its rounding, so that it may lie between them"
)
INPUTS_HIDDEN = (
    "borne out, but not confirmed: two examples that differ by a tenth of their range, stated as one, could make this "
    "update to its rounding, so that it may lie between them"
)
OTHER_LABELS = "another label makes all of the update as well, so that labels are not told"
SOME_UNTOLD = (
    "not confirmed: with another in place of one of them the update is the same to its rounding, as next to nothing "
    "flows back of that one"
)
UNLIKE_HIDDEN = (
    "borne out if it is of one example: two that are unlike each other, stated as one, could make this update to its "
    "rounding, as where all that flows back has one direction, so that it may lie anywhere between them"
)
UNLIKE_HIDDEN_BY = (
    "borne out if it is of one example: two that are unlike each other, stated as one, could make this update to the "
    "rounding of {}, so that it may lie between them"
)
UNLIKE_NEARLY_HIDDEN = (
    "borne out if it is of one example: two that are unlike each other, stated as one, could make this update as "
    "nearly as it does, so that it may lie anywhere between them"
)
MEAN_OF_UNLIKE = (
    f"{MEAN_OF_PICTURES}, and for all that the update tells they may be unlike each other, so that it is like none"
)
FOLDED = (
    "one of several pictures that make the update: what the network does to pixels below its first trained parameters "
    "comes out the same for others"
)
REARRANGED = (
    "one of several pictures that make the update: with parts of it in another order the network returns the same, so "
    "that its parts are told, but not their order"
)
NEGATIVE = (
    "one of several pictures that make the update: the network takes a picture for its negative, of the same class or "
    "of the other one"
)
CONTRAST_OPEN = (
    "one of several pictures that make the update: others of another brightness or contrast make it to its rounding, "
    "as where the network takes brightness or contrast off"
)
CHANNELS_CONTRAST_OPEN = (
    "one of several pictures that make the update: others, of which single channels have another brightness or "
    "contrast, make it to its rounding, as where the network takes brightness or contrast off their channels"
)
CONTRAST_NEARLY = (
    "borne out, but not confirmed to a quarter of a level: pictures that are a little brighter or darker, or of a "
    "little more or less contrast, make the update to its rounding, too, and such of quite another do not"
)
CHANNELS_CONTRAST_NEARLY = (
    "borne out, but not confirmed to a quarter of a level: pictures of which single channels are a little brighter or "
    "darker, or of a little more or less contrast, make the update to its rounding, too, and such of quite another do "
    "not"
)
CONTRAST_LOOSE = (
    "the picture is known up to its brightness and contrast: pictures of another make the update as nearly as it does"
)
CHANNELS_CONTRAST_LOOSE = (
    "the picture is known up to brightness and contrast of its channels: pictures in which those of a channel are "
    "others make the update as nearly as it does"
)
UNCOMPARED = (
    "not confirmed: the network does not run on other pictures, or returns something else for one each time, so that "
    "nobody can tell which others it confuses with this one"
)
FEWER_GIVEN = "one of several pictures that make the update: of {count} numbers the network is given {seen}"
SHIFT_OPEN = f"{FEWER_GIVEN}, and not how bright the picture is"
CHANNELS_SHIFT_OPEN = f"{FEWER_GIVEN}, and not how bright its channels are"
UNSEEN = (
    "borne out as far as the network sees it: {unseen} of the {count} numbers of the picture change nothing in the "
    "update"
)
LEFT_OUT = (
    "not confirmed: one step on it does not make the numbers that the defense let through, which tell more than those "
    "that it was read from"
)
LEFT_OUT_LABELS = (
    "not confirmed: what the defense let through does not tell the labels, without which no step on it can be compared"
)
LEFT_OUT_NEARLY = (
    "borne out, but not confirmed to a quarter of a level: one step on it makes the numbers that the defense let "
    "through but for more than rounding"
)
RULE_DOUBTED = "not confirmed: nothing in the update tells whether it was a step as stated, and it looks like"
ANY_LOSS = (
    "the gradient of the outputs was taken from the update, since no target of the loss as stated makes it, or none is "
    "known: the label is not told"
)
AS_ROUNDED = (
    "the network is so certain of its class that rounding left few digits of what flows back into that output, or none"
)
SMOOTHED = "its targets are those of cross entropy with label smoothing"
STATISTICS_CONTRADICTED = (
    "not confirmed: the update does not tell how bright the picture is, and the statistics of batch normalization that "
    "came back are not those of the picture"
)
SIZE_CONTRADICTED = (
    "not confirmed: one step as stated makes an update of another size from it, and nothing else in the update tells "
    "how bright it is; check the step size and the optimizer"
)
SIZE_UNSTATED = (
    "not confirmed: nothing in the update tells how bright the picture is but its size, which nobody knows without the "
    "step size; state that (method, --method)"
)
COPIES_UNCOUNTED = (
    "not confirmed: some of the pictures are the same, and the size of the update does not bear out how many there "
    "are, as one of which the network is certain leaves nothing in it; check or state the step size (method, --method)"
)
OPEN_NUMBERS = (
    "not verified: {} of the {} numbers of the picture are open, which what it was read from fixes to no level of "
    "8 bits"
)
LEFT_UNEXPLAINED = (
    "not verified: {:.1e} of the equations that it was read from is left unexplained, or they do not fix it to {}"
)
UNEXPLAINED = "not verified: the equations that it was read from are left unexplained, or do not fix it to {}"
DEFENSE_UNKNOWN = "the defense is unknown, and may have changed these equations"
LOADER = (
    "a loader may normalize pixels, which the model then has to do: "
    "model.register_forward_pre_hook(lambda module, inputs: ((inputs[0] - mean) / std,))"
)
"""What pixels beyond their range may come from, and the way on."""
_OF_PICTURES = {"picture": "example", "image": "example", "pixel": "number"}


def in_words_of(form: InputForm, words: str) -> str:
    """Return what is said of pictures and pixels as it is said of other inputs (rows of a table, series, ids).

    Args:
        form: of what the network takes.
        words: of a result.
    """
    if form.is_image or any(len(part.shape) == 3 and not part.ids for part in form.parts):
        return words

    def exchange(found: re.Match[str]) -> str:
        article, word, several = found.groups()
        other = _OF_PICTURES[word]
        before = "" if not article else "an " if other == "example" else "a "
        return f"{before}{other}{several}"

    return re.sub(r"(?<![-\w'])(an? )?(picture|image|pixel)(s?)(?![-\w])", exchange, words)
