"""Which ids a client fed, read off the update of an embedding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from attacks.analytic.tied_embeddings import (
    TiedWeight,
    drawn_targets,
    moved_by_outputs,
    moved_by_two_scores,
    read_tied_ids,
)
from attacks.base import Attack, NotApplicable, Reconstruction, Result, attacks
from attacks.labels.recovery import LABELS_COUNTED, are_labels_proven, fixed_labels
from attacks.network.embeddings import (
    columns_looked_up,
    looked_up_weights,
    lookups,
    lookups_of_single_examples,
    unconditional_ids,
)
from attacks.result import Remark
from attacks.update.fresh_optimizer import contradicts_fresh_state
from attacks.update.observed_update import ObservedUpdate
from attacks.update.training_phases import deviation_from_loss_gradient
from fl.predict import predict
from fl.seeds import stream
from fl.tensors import Value, dense
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
        weights = looked_up_weights(view.task)
        sent = [name for name in weights if name in view.update and name in view.shared]
        if not sent:
            return NotApplicable(NOT_SENT.format(", ".join(weights)) if weights else NO_EMBEDDING, limit=True)
        if (reason := deviation_from_loss_gradient(view)) is not None:
            return NotApplicable(reason)
        update = _EmbeddingUpdate.of(view)
        sparse = _sparse_embeddings(update, sent)
        rows = _rows_of_ids(update, sparse)
        if isinstance(rows, NotApplicable):
            return rows
        told = {name: _without(ids, update.always[name]) for name, ids in rows.items()}
        found = {name: ids for name, ids in told.items() if len(ids)}
        tied, doubts, refusals = _read_tied(update, [name for name in sent if name not in sparse])
        found |= tied
        if not found:
            return _nothing_read(update, refusals, rows)
        return _as_result(update, found, _doubt(update, rows, doubts))

    def confirm(self, view: ServerView, result: Result) -> Result:
        """Return the result as it is: that rows at rest were not looked up holds for any rule that starts from rest."""
        return result


NO_EMBEDDING = (
    "no embedding (nn.Embedding, or a parameter of which ids or one-hot vectors made of them look up rows) is in the "
    "update"
)
TOO_MANY = (
    "{} rows of {} moved, and no more than {} ids were fed: momentum kept from earlier rounds, weight decay in a part "
    "of the rows, or more examples than stated moved rows as well; state it, or take what earlier rounds left off"
)
LOOKED_UP_ANYWAY = "what moved of {} is looked up whatever the client feeds (positions, say), and tells nothing of it"
NOT_SENT = (
    "{} is not in the update (frozen, say), and rows of it that moved are what ids are read off; what the inputs of "
    "other layers tell of ids is not read. An adapter on the embedding shows ids as well"
)
NOTHING_FLOWS = (
    "no row of {} moves in a step from the weights that were sent: what its rows are multiplied by is 0, as the second "
    "matrix of an adapter before its first step; what moves there mixes the rows of all ids. Audit a later step, in "
    "which the rows of ids move"
)
ALL_MOVED = (
    "every row of the embeddings moved, or none: noise, decay of an unknown rule, ids of all rows in one batch, or a "
    "weight that another layer uses as well"
)
NEVER_REACHED = (
    "not confirmed: no example that was made up looks anything up in {}, so that how many rows may move is unknown"
)
UNSTATED = (
    "not confirmed: the optimizer or the defense was not stated, and one that moves other rows (momentum kept from "
    "earlier rounds, decay) would be read as ids; state it (method, --method) to rely on that"
)


@dataclass(frozen=True)
class _EmbeddingUpdate:
    """An update with what is known of the network's embeddings.

    Attributes:
        view: what the server saw.
        observed: its update.
        slots: how many ids each embedding looks up of all examples; nothing of a group's.
        always: ids that each looks up whatever is fed.
        columns: weights (d, V) that have a column for each id, as a linear layer's that is fed one-hot vectors.
    """

    view: ServerView
    observed: ObservedUpdate
    slots: dict[str, int]
    always: dict[str, set[int]]
    columns: frozenset[str]

    @classmethod
    def of(cls, view: ServerView) -> _EmbeddingUpdate:
        """Return what a view has of embeddings."""
        always, columns = unconditional_ids(view.task), columns_looked_up(view.task)
        return cls(view, ObservedUpdate(view), _count_lookups(view), always, columns)

    def by_id(self, name: str, value: Value) -> Tensor:
        """Return the numbers of an embedding's weight with a row for each id."""
        return dense(value).mT if name in self.columns else dense(value)

    def moved(self, name: str, change: Value) -> Tensor:
        """Return the ids (V,) whose embedding changed by more than rounding."""
        start, whole = self.by_id(name, self.view.shared[name]), self.by_id(name, change)
        decayed = bool((self.by_id(name, self.view.update[name]) != whole).any())
        spacing = GRID * torch.finfo(self.view.dtype).eps * start.abs() if decayed else torch.zeros_like(start)
        return (whole.abs() > spacing).any(1)


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


def _without(ids: Tensor, always: set[int]) -> Tensor:
    """Return ids (M,) without those that are looked up whatever is fed."""
    return torch.tensor([row for row in ids.tolist() if row not in always], dtype=torch.int64)


def _rows_of_ids(update: _EmbeddingUpdate, names: Sequence[str]) -> dict[str, Tensor] | NotApplicable:
    """Return the embeddings' rows that moved; a refusal if more did than ids were fed."""
    rows: dict[str, Tensor] = {}
    for name in names:
        moved = update.moved(name, update.observed.change[name])
        at_rest, decays = ~moved, (update.by_id(name, update.view.shared[name]) != 0).any(1)
        if bool(decays.any()):  # not in an adapter that starts at zero
            at_rest &= decays
        if not bool(moved.any() and at_rest.any()):
            continue
        if (most := update.slots.get(name)) is not None and int(moved.sum()) > most:
            return NotApplicable(TOO_MANY.format(int(moved.sum()), name, most), limit=True)
        rows[name] = moved.nonzero().flatten().cpu()
    return rows


def _read_tied(
    update: _EmbeddingUpdate, names: Sequence[str]
) -> tuple[dict[str, Tensor], list[str], list[NotApplicable]]:
    """Return the ids of embeddings that move in every row, what keeps them from being confirmed, and refusals."""
    found, doubts, refusals = dict[str, Tensor](), list[str](), list[NotApplicable]()
    for name in names:
        change, start = (update.by_id(name, value[name]) for value in (update.observed.change, update.view.shared))
        scores = _scores_outputs(update, name, len(change))
        weight = TiedWeight(name, change, start, update.slots.get(name), update.always[name], scores)
        read = read_tied_ids(update.view, update.observed, weight)
        if isinstance(read, NotApplicable):
            refusals.append(read)
            continue
        found[name] = read.ids
        doubts += [read.doubt] if read.doubt else []
    return found, doubts, refusals


def _scores_outputs(update: _EmbeddingUpdate, name: str, count: int) -> bool:
    """Return whether each row of an embedding scores its own word in the outputs, and is used for no more."""
    view = update.view
    for number in range(PROBES):
        draw = stream(number, "scores")
        inputs = torch.rand(view.batch_size or 1, *view.task.input_shape, generator=draw).to(view.device, view.dtype)
        words, made = moved_by_two_scores(view, inputs, count, draw)
        met = {*lookups(view.task, inputs).get(name, torch.empty(0)).tolist()}
        if name not in made or not {*update.by_id(name, made[name]).any(1).nonzero().flatten().tolist()} <= words | met:
            return False
    return True


def _nothing_read(
    update: _EmbeddingUpdate, refusals: Sequence[NotApplicable], rows: Mapping[str, Tensor]
) -> NotApplicable:
    """Return why no id was read, where these rows moved and these weights were refused."""
    if refusals:
        return refusals[0]
    if rows:
        return NotApplicable(LOOKED_UP_ANYWAY.format(", ".join(rows)), limit=True)
    still = _without_flow(update)
    return NotApplicable(NOTHING_FLOWS.format(", ".join(still)), limit=True) if still else NotApplicable(ALL_MOVED)


def _without_flow(update: _EmbeddingUpdate) -> list[str]:
    """Return the embeddings that did not move, and don't in a step on a batch of the attacker's own."""
    view, draw = update.view, stream(0, "flow")
    inputs = torch.rand(view.batch_size or 1, *view.task.input_shape, generator=draw).to(view.device, view.dtype)
    made, change = moved_by_outputs(view, inputs, draw), update.observed.change
    met = [name for name in lookups(view.task, inputs) if name in made and name in change]
    return [name for name in met if not bool(dense(made[name]).any() or dense(change[name]).any())]


def _doubt(update: _EmbeddingUpdate, rows: Mapping[str, Tensor], doubts: Sequence[str]) -> str:
    """Return what keeps ids from being confirmed, or nothing.

    Args:
        update: of the embeddings.
        rows: those that moved, of embeddings that move in the rows of ids alone.
        doubts: of others.
    """
    view, slots = update.view, update.slots
    if not (view.threat.knows_optimizer and view.threat.knows_defense):
        return UNSTATED
    if contradiction := contradicts_fresh_state(view, update.observed, rows, update.columns):
        return contradiction
    missed = [name for name in rows if name not in slots and slots]
    return "; ".join([*doubts, *([NEVER_REACHED.format(", ".join(missed))] if missed else [])])


def _as_result(update: _EmbeddingUpdate, found: Mapping[str, Tensor], doubt: str) -> Reconstruction:
    """Return ids as a result, with the labels that are told beside them."""
    view = update.view
    result = Reconstruction(
        inputs=None,
        labels=fixed_labels(view, "auto"),
        private={TOKENS + name: ids for name, ids in found.items()},
        knowledge=() if view.labels is None else ("labels",),
        verified=None if doubt else True,
        note=doubt,
    )
    counted = result.labels is not None and view.labels is None and view.task.loss.is_cross_entropy
    doubtful = counted and view.method.uses_labels and not are_labels_proven(view)
    return result.with_note(LABELS_COUNTED, Remark.LABELS_DOUBTFUL) if doubtful else result


def _sparse_embeddings(update: _EmbeddingUpdate, names: Sequence[str]) -> list[str]:
    """Return the embeddings in which a step moves the rows of the ids it is fed, and no others."""
    view, kept = update.view, list(names)
    for number in range(PROBES):
        draw = stream(number, "tokens")
        inputs = torch.rand(view.batch_size or 1, *view.task.input_shape, generator=draw).to(view.device, view.dtype)
        ids = lookups(view.task, inputs)
        made = moved_by_outputs(view, inputs, draw)
        if (targets := drawn_targets(view, draw)) is not None and not (view.private or view.parts):
            with torch.no_grad():
                made |= ObservedUpdate(view).without_decay(predict(view, Candidate(inputs, targets)))
        for name in [name for name in kept if name in made]:
            rows = update.moved(name, made[name]).nonzero().flatten().tolist()
            if not {*rows} <= {*ids.get(name, torch.empty(0)).tolist()}:
                kept.remove(name)
    return kept
