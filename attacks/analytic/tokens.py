"""Which ids a client fed, read off the update of an embedding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from attacks.analytic.tied_embeddings import drawn_targets, moved_by_outputs, read_tied_ids
from attacks.base import Attack, NotApplicable, Reconstruction, Result, attacks
from attacks.labels.recovery import LABELS_COUNTED, are_labels_proven, fixed_labels
from attacks.network.embeddings import (
    looked_up_weights,
    lookups,
    lookups_of_single_examples,
    unconditional_ids,
)
from attacks.result import Remark
from attacks.update.observed_update import ObservedUpdate
from attacks.update.optimizer_at_rest import contradicts_rest
from attacks.update.training_phases import deviation_from_loss_gradient
from fl.predict import predict
from fl.seeds import stream
from fl.tensors import Tensors, dense
from fl.types import Candidate
from fl.view import ServerView

TOKENS = "tokens/"
"""What the names of ids begin with in a result; behind it stands the embedding's weight."""
PROBES = 2
"""Batches of the attacker's own that show whether a step moves the rows of its ids alone."""
GRID = 8.0
"""Spacings of the weights up to which a row has not moved, where decay was taken off."""


@attacks.register("tokens")
@dataclass(frozen=True, kw_only=True)
class Tokens(Attack):
    """Reads which ids (of tokens, of categories) occur in a client's data: their rows of an embedding moved.

    The gradient of an embedding's weight is zero in every row that is not looked up (Melis et al., IEEE S&P 2019,
    section 4.1; FILM, Gupta et al., NeurIPS 2022, section 3.1), and so is any step of an optimizer that starts from
    rest. So every row that moved was fed. A row that was fed may stay: where nothing flows back into it (behind max
    pooling, say), or where it stands for padding. In what order ids stand, and in which example, is not told.

    Whether a step of this network moves the rows of its ids alone is asked of batches of the attacker's own: weights
    that another layer uses, too, move in every row. Where that layer scores the outputs, as in most language models,
    ids are the rows that leave the span of all others (`attacks.analytic.tied_embeddings`). Noise moves all rows, and
    then nothing is read. A method that adds to the gradient may move others as well, and is refused.

    Threat model: an honest server with the embedding's update; that rows start from rest is part of an optimizer that
    was stated.
    """

    reads_ids: ClassVar[bool] = True
    plain: ClassVar[str] = "reads which words a client's data hold off the rows of an embedding that moved."

    def attack_view(self, view: ServerView, seed: int) -> Result:
        """Return the ids of every embedding that was sent, ascending."""
        if not view.update:
            return NotApplicable("nothing is shared")
        sent = [name for name in looked_up_weights(view.task) if name in view.update and name in view.shared]
        if not sent:
            return NotApplicable(NO_EMBEDDING, limit=True)
        if (reason := deviation_from_loss_gradient(view)) is not None:
            return NotApplicable(reason)
        sparse = _sparse_embeddings(view, sent)
        observed, found, slots = ObservedUpdate(view), dict[str, Tensor](), _count_lookups(view)
        always, rows = unconditional_ids(view.task), dict[str, Tensor]()
        for name in sparse:
            moved = _moved_rows(view, name, dense(observed.change[name]))
            at_rest = ~moved & (dense(view.shared[name]) != 0).any(1)  # decay moves no row of zeros
            if not bool(moved.any() and at_rest.any()):
                continue
            if (most := slots.get(name)) is not None and int(moved.sum()) > most:
                return NotApplicable(TOO_MANY.format(int(moved.sum()), name, most), limit=True)
            rows[name] = moved.nonzero().flatten().cpu()
            told = [row for row in rows[name].tolist() if row not in always[name]]
            if told:
                found[name] = torch.tensor(told)
        doubts, refusals = list[str](), list[NotApplicable]()
        for name in [name for name in sent if name not in sparse]:
            read = read_tied_ids(view, observed, name, slots.get(name), always[name])
            if isinstance(read, NotApplicable):
                refusals.append(read)
                continue
            found[name] = read.ids
            doubts += [read.doubt] if read.doubt else []
        if not found and refusals:
            return refusals[0]
        if rows and not found:
            return NotApplicable(LOOKED_UP_ANYWAY.format(", ".join(rows)), limit=True)
        if not found:
            return NotApplicable(
                "every row of the embeddings moved, or none: noise, decay of an unknown rule, ids of all rows in one "
                "batch, or a weight that another layer uses as well"
            )
        private: Tensors = {TOKENS + name: ids for name, ids in found.items()}
        known = view.threat.knows_optimizer and view.threat.knows_defense
        if missed := [name for name in rows if name not in slots and slots]:
            doubts.append(NEVER_REACHED.format(", ".join(missed)))
        doubt = UNSTATED if not known else contradicts_rest(view, observed, rows) or "; ".join(doubts)
        found_ids = Reconstruction(
            inputs=None,
            labels=fixed_labels(view, "auto"),
            private=private,
            knowledge=() if view.labels is None else ("labels",),
            verified=None if doubt else True,
            note=doubt,
        )
        counted = found_ids.labels is not None and view.labels is None and view.task.loss.is_cross_entropy
        doubtful = counted and view.method.uses_labels and not are_labels_proven(view)
        return found_ids.with_note(LABELS_COUNTED, Remark.LABELS_DOUBTFUL) if doubtful else found_ids

    def confirm(self, view: ServerView, result: Result) -> Result:
        """Return the result as it is: that rows at rest were not looked up holds for any rule that starts from rest."""
        return result


NO_EMBEDDING = "no embedding (nn.Embedding, or a parameter of which rows are looked up) is in the update"
TOO_MANY = (
    "{} rows of {} moved, and no more than {} ids were fed: momentum kept from earlier rounds, weight decay in a part "
    "of the rows, or more examples than stated moved rows as well; state it, or take what earlier rounds left off"
)
LOOKED_UP_ANYWAY = "what moved of {} is looked up whatever the client feeds (positions, say), and tells nothing of it"
NEVER_REACHED = (
    "not confirmed: no example that was made up looks anything up in {}, so that how many rows may move is unknown"
)
UNSTATED = (
    "not confirmed: the optimizer or the defense was not stated, and one that moves other rows (momentum kept from "
    "earlier rounds, decay) would be read as ids; state it (method, --method) to rely on that"
)


def _count_lookups(view: ServerView) -> dict[str, int]:
    """Return how many ids each embedding looks up of all examples, by the name of its weight; nothing of a group's."""
    if view.batch_size is None or view.parts:
        return {}
    shape = (view.batch_size, *view.task.input_shape)
    size = math.prod(shape)
    spread = (torch.arange(size).view(shape) + 0.5) / (2 * size)  # different ids, as far as there are so many
    draws = [torch.rand(shape, generator=stream(0, "lookups")), spread]
    most: dict[str, int] = {}
    for found in [lookups(view.task, inputs.to(view.device, view.dtype)) for inputs in draws]:
        most |= {name: max(len(ids), most.get(name, 0)) for name, ids in found.items()}
    for found in lookups_of_single_examples(view.task):  # some look up more than others, and a batch may be of these
        most |= {name: max(view.batch_size * len(ids), most.get(name, 0)) for name, ids in found.items()}
    return most


def _moved_rows(view: ServerView, name: str, change: Tensor) -> Tensor:
    """Return which rows (K,) of an embedding's update are no rounding."""
    start = dense(view.shared[name])
    decayed = bool((dense(view.update[name]) != change).any())
    spacing = GRID * torch.finfo(view.dtype).eps * start.abs() if decayed else torch.zeros_like(start)
    return (change.abs() > spacing).any(1)


def _sparse_embeddings(view: ServerView, names: list[str]) -> list[str]:
    """Return the embeddings of which a step moves the rows of the ids that they are given, and no others."""
    kept, task = list(names), view.task
    for number in range(PROBES):
        draw = stream(number, "tokens")
        inputs = torch.rand(view.batch_size or 1, *task.input_shape, generator=draw).to(view.device, view.dtype)
        ids = lookups(task, inputs)
        made = moved_by_outputs(view, inputs, draw)
        if (targets := drawn_targets(view, draw)) is not None and not (view.private or view.parts):
            with torch.no_grad():
                made |= ObservedUpdate(view).without_decay(predict(view, Candidate(inputs, targets)))
        for name in [name for name in kept if name in made]:
            rows = _moved_rows(view, name, dense(made[name])).nonzero().flatten().tolist()
            if not {*rows} <= {*ids.get(name, torch.empty(0)).tolist()}:
                kept.remove(name)
    return kept
