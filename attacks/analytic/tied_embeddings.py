"""Reads ids off an embedding whose weight scores the outputs as well, as in most language models.

There logits are W h, with the embedding W (V, d), for each of T hidden states h_t (d,). The gradient of W is

    G = sum_t g_t h_t^T + E,

where g_t (V,) is what flows back into the logits of position t, and E what flows back into the rows that were looked
up: it is zero in all others. So the rows of the V - M ids that were not looked up lie in the span S of the hidden
states, of at most T dimensions. Rows looked up leave it, where T < d leaves room. What the ids are that a client
predicts does not matter, as g_t changes a row within S alone. (DAGER, Petrov et al., NeurIPS 2024, tests tokens by the
span of a linear layer's gradient likewise.)

S is fitted to rows that need not be known to be inside. It is the whole span only if it has as many dimensions as
there are hidden states. One that no row shows but that of the word it predicts, as where the network is sure of it,
would make that word look fed. So with fewer dimensions nothing is proven. And S is known up to rounding alone: rows
with errors of 1 in each number, whose singular values along directions b_i are s_i, put these off by 1 / s_i. The
distance of a row x from S is then off by (1 + sum_i (x b_i / s_i)^2)^(1/2). That is large of words that are predicted
where other rows hardly show their hidden state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacks.network.operation_trace import MODEL_ERRORS
from attacks.result import NotApplicable
from attacks.update.float_rounding import RMS_ROUNDING
from attacks.update.observed_update import ObservedUpdate
from attacks.update.training_phases import adaptive_optimizer_obstacle, training_phases
from fl.defense import Defense, UnknownDefense, overrides
from fl.losses.function import OwnLoss
from fl.network import call_with
from fl.seeds import stream
from fl.tensors import Tensors, dense
from fl.types import Phase
from fl.view import ServerView

MOST_NOISE, ABOVE_NOISE = 8.0, 4.0
"""Errors of numbers that sums over positions leave, in units of their rounding; and how far above noise, as it is seen,
a dimension of the span has to be."""
FEWER_BITS = (torch.float16, torch.bfloat16)
"""What gradients are rounded to under mixed precision, or on their way."""
MOSTLY = 0.5
"""Share of rows that have to be numbers of such a type: those looked up add up two parts."""
PROPORTIONAL = 1e-6
"""How far off numbers that were multiplied by one factor may be, relative to the largest."""
GAP = 25.0
"""How far outside a row is that was looked up, relative to the rows by which the span was found."""
BLUR = 5.0
"""How far outside a row that was not looked up may be, likewise."""
FOLDS, SPARE = 3, 8
"""Parts of the rows that must each span all dimensions, and rows of a part beyond twice the dimensions."""
ATTEMPTS = 4
"""Choices of rows that the span is fitted to."""
SCORED, SHARED = "the outputs are scored by it as well", "another layer uses it as well"
"""Why rows move that were not looked up."""
UNKNOWN_STEPS = (
    "every row of {} moves, as {}; ids are read off these rows where the number of examples and of their steps is "
    "known, of one client: state it (batch_size, method)"
)
DEFENDED = "every row of {} moves, as {}; ids are told by the span of these rows, and the defense {} changes that"
RESCALED = (
    "every row of {} moves, as {}; ids are told by the span of these rows, and an optimizer that rescales every number "
    "apart (Adam) leaves none"
)
NO_ROOM = (
    "every row of {} moves, as {}; ids are told by what leaves the span of the {} hidden states that score them, and "
    "these may fill all {} dimensions: fewer examples, or shorter ones, leave room"
)
NOT_TOLD = (
    "every row of {} moves, and no more than {} leave a span of {} dimensions, as one step would leave it, clearly: "
    "noise, numbers of few bits, several steps, steps too short for the type of the weights, earlier rounds, or more "
    "examples than stated; gradients themselves, or one larger step, tell more"
)
KEPT_MOMENTUM = (
    "not confirmed: momentum kept from earlier rounds would move rows of {} by ids and hidden states of other examples"
)
FEW_BITS = "not confirmed: the update of {} has few bits, which other optimizers than stated could hide behind"
SEVERAL_STEPS = "not confirmed: hidden states of several steps differ, so that the span of all of them is blurred"
NOT_ALL = (
    "not confirmed: the rows of {} show {} of {} hidden states, and a word that is predicted where the others show "
    "nothing (padding, equal beginnings, or a network that is sure of it) would be read as fed"
)
NOT_COUNTED = (
    "not confirmed: how many hidden states meet the rows of {} is not known, as {}, and a row that one of them reaches "
    "where the others show nothing would be read as fed"
)
BLURRED = "not confirmed: {} more row(s) of {} are not clear"


@dataclass(frozen=True)
class TiedIds:
    """Ids that were fed (M,), and what keeps them from being confirmed."""

    ids: Tensor
    doubt: str


@dataclass(frozen=True)
class TiedWeight:
    """An embedding whose rows all move.

    Attributes:
        name: of its weight.
        change: its update, a row for each id (V, d).
        start: the weight that was sent, likewise.
        lookups: ids that all examples look up in one step; None where that is not known.
        always: ids that are looked up whatever is fed.
        scores: whether each row scores its own word in the outputs.
    """

    name: str
    change: Tensor
    start: Tensor
    lookups: int | None
    always: set[int]
    scores: bool

    @property
    def use(self) -> str:
        """Why its rows move that were not looked up, in words."""
        return SCORED if self.scores else SHARED


@dataclass(frozen=True)
class OutsideRows:
    """Rows that leave the span of the others.

    Attributes:
        ids: of these rows, ascending int64 (M,).
        rank: dimensions of the span.
        blurred: rows for which neither is clear.
    """

    ids: Tensor
    rank: int
    blurred: int


@dataclass(frozen=True)
class _Span:
    """Directions (d, r) with their singular values (r,) in the rows that showed them; noise is what these leave."""

    directions: Tensor
    sizes: Tensor
    noise: float = 1.0

    @property
    def rank(self) -> int:
        return len(self.sizes)

    def outside(self, rows: Tensor) -> Tensor:
        """Return how far rows (N, d) are outside, (N,): about 1 of what is inside."""
        along = rows @ self.directions
        off = (rows - along @ self.directions.mT).square().mean(1).sqrt()
        return off / self.noise / (1 + (along / self.sizes).square().sum(1)).sqrt()


def read_tied_ids(view: ServerView, observed: ObservedUpdate, weight: TiedWeight) -> TiedIds | NotApplicable:
    """Return the ids that an embedding was given, whose weight scores the outputs as well.

    Args:
        view: what the server saw.
        observed: its update.
        weight: the embedding's.
    """
    phases, schedule = training_phases(view)
    steps = [sum(step) for phase in schedule or () for step in phase]
    if view.parts or weight.lookups is None or not steps:
        return NotApplicable(UNKNOWN_STEPS.format(weight.name, weight.use), limit=True)
    if adaptive_optimizer_obstacle(phases) is not None:
        return NotApplicable(RESCALED.format(weight.name, weight.use), limit=True)
    if not _only_rescales(view, weight.name):
        return NotApplicable(DEFENDED.format(weight.name, weight.use, view.defense.name), limit=True)
    passes = max(1, math.ceil(sum(steps) / (view.batch_size or 1)))
    states, most = hidden_states(view, len(weight.change)) if weight.scores else None, weight.lookups * passes
    hidden = len(weight.change) if states is None else passes * states
    if states is not None and hidden >= weight.change.shape[1]:
        return NotApplicable(NO_ROOM.format(weight.name, weight.use, hidden, weight.change.shape[1]), limit=True)
    whole = view.rounded or weight.name in observed.decay_shares
    found, coarse = _outside_of_any_type(weight.change, weight.start if whole else None, most, hidden)
    if found is None:
        room = min(hidden, weight.change.shape[1] - 1)
        return NotApplicable(NOT_TOLD.format(weight.name, most, room), limit=True)
    ids = torch.tensor([row for row in found.ids.tolist() if row not in weight.always], dtype=torch.int64)
    if not len(ids):
        return NotApplicable(f"what is told of {weight.name} is looked up whatever the client feeds", limit=True)
    if coarse:
        return TiedIds(ids, FEW_BITS.format(weight.name))
    return TiedIds(ids, _doubt(weight, phases, len(steps), found, states))


def _outside_of_any_type(
    change: Tensor, start: Tensor | None, most: int, hidden: int
) -> tuple[OutsideRows | None, bool]:
    """Return the rows that leave the span of all others, and whether these are numbers of few bits.

    Args:
        change: an update (V, d).
        start: the weights that it is a difference of; None for a gradient.
        most: rows outside that there may be.
        hidden: dimensions that the span may have.
    """
    found, coarse = rows_outside(change, rounding_of_rows(change, start), most, hidden), False
    for kind in FEWER_BITS:
        if found is None and float((change == change.to(kind)).all(1).double().mean()) >= MOSTLY:
            found, coarse = rows_outside(change, rounding_of_rows(change, start, kind), most, hidden), True
    return found, coarse


def _doubt(weight: TiedWeight, phases: Sequence[Phase], steps: int, found: OutsideRows, states: int | None) -> str:
    """Return what keeps ids of a number of steps from being confirmed, or nothing."""
    if steps != 1:
        return SEVERAL_STEPS
    if any(phase.momentum for phase in phases):
        return KEPT_MOMENTUM.format(weight.name)
    if states is None:
        return NOT_COUNTED.format(weight.name, weight.use)
    if found.rank != states:
        return NOT_ALL.format(weight.name, found.rank, states)
    return BLURRED.format(found.blurred, weight.name) if found.blurred else ""


def _only_rescales(view: ServerView, name: str) -> bool:
    """Return whether the defense that is known leaves a tensor's numbers in proportion, as clipping does."""
    defense = view.client.defense
    if type(defense) is Defense or isinstance(defense, UnknownDefense):
        return True  # one that is not known may, and nothing is confirmed
    others = ("wrap_model", "transform_batch", "draw", "gradient", "search_gradient")
    if any(overrides(defense, hook) for hook in others):
        return False
    tried: Tensors = dict(view.update)
    tried[name] = torch.randn(view.shared[name].shape, generator=stream(0, "rescaled")).to(view.device, view.dtype)
    sent, whole = (
        dense(defense.transform_update(tried, stream(1, "rescaled"))[name]).double(),
        dense(tried[name]).double(),
    )
    factor = (sent * whole).sum() / whole.square().sum()
    return bool(factor > 0 and (sent - factor * whole).abs().max() <= PROPORTIONAL * (factor * whole).abs().max())


def hidden_states(view: ServerView, words: int) -> int | None:
    """Return how many vectors of scores of all words a step of all examples is taken along; None where not known.

    A loss may leave some out, as one that compares each output with the next word does.

    Args:
        view: what the server saw.
        words: rows of the embedding.
    """
    shape, count = view.task.output_shape, view.batch_size or 1
    if list(shape).count(words) != 1:
        return None
    draw = stream(0, "hidden states")
    if (targets := drawn_targets(view, draw)) is None:
        return None
    outputs = torch.randn(count, *shape, generator=draw).to(view.device, view.dtype).requires_grad_()
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        (flow,) = torch.autograd.grad(view.task.loss(outputs, targets), [outputs])
    return int((flow != 0).any(1 + list(shape).index(words)).sum())


def drawn_targets(view: ServerView, draw: torch.Generator) -> Tensor | None:
    """Return targets that the loss takes of a batch of the attacker's own; None where that is not known."""
    task, count = view.task, view.batch_size or 1
    if view.labels is not None:
        return view.labels
    if (shape := task.loss.variable_shape(task.output_shape)) is not None:
        return task.loss.relax(torch.randn(count, *shape, generator=draw)).to(view.device, view.dtype)
    outputs = torch.randn(count, *task.output_shape, generator=draw).to(view.device, view.dtype)
    for axis, classes in reversed([*enumerate(task.output_shape)]):  # a class for each place of the outputs, say
        rest = [size for other, size in enumerate(task.output_shape) if other != axis]
        targets = torch.randint(classes, (count, *rest), generator=draw).to(view.device)
        if isinstance(task.loss, OwnLoss) and task.loss.takes(outputs, targets):
            return targets
    return None


def moved_by_outputs(view: ServerView, inputs: Tensor, draw: torch.Generator) -> Tensors:
    """Return the gradient by what was sent of a random mixture of the outputs of some inputs; nothing if it has none.

    What a loss adds shows nowhere else: rows that stay where all outputs count stay whatever the loss.
    """
    return _moved_by(view, inputs, lambda outputs: outputs * torch.randn(outputs.shape, generator=draw).to(outputs))


def moved_by_two_scores(
    view: ServerView, inputs: Tensor, count: int, draw: torch.Generator
) -> tuple[set[int], Tensors]:
    """Return two words, and the gradient by what was sent of how much more one is scored than the other.

    Of an embedding that scores the outputs it is zero in all rows but those two and the ones looked up, also where the
    outputs are logarithms of probabilities. It is empty where outputs have no such scores, or no gradient.

    Args:
        view: what the server saw.
        inputs: of a batch (B, C, H, W).
        count: of words.
        draw: which words, and by how much each position counts.
    """
    if count < 2 or list(view.task.output_shape).count(count) != 1:
        return set(), {}
    axis, words = 1 + list(view.task.output_shape).index(count), torch.randperm(count, generator=draw)[:2].tolist()

    def mixture(outputs: Tensor) -> Tensor:
        difference = outputs.select(axis, words[0]) - outputs.select(axis, words[1])
        return difference * torch.randn(difference.shape, generator=draw).to(difference)

    return {*words}, _moved_by(view, inputs, mixture)


def _moved_by(view: ServerView, inputs: Tensor, mixture: Callable[[Tensor], Tensor]) -> Tensors:
    """Return the gradient by what was sent of the sum of what is made of the outputs; nothing if it has none."""
    model = view.task.model
    sent = {name: dense(value).detach().requires_grad_() for name, value in view.shared.items()}
    known = {name for name, _ in model.named_parameters()}
    used = {name: value.clone() for name, value in model.named_buffers()}  # batch norm counts what it is given
    used |= {name: value for name, value in sent.items() if name in known}
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            outputs = call_with(model, used, inputs)
            flows = torch.autograd.grad(mixture(outputs).sum(), [*sent.values()], allow_unused=True)
    except MODEL_ERRORS:
        return {}
    return {name: flow for name, flow in zip(sent, flows, strict=True) if flow is not None}


def rounding_of_rows(change: Tensor, start: Tensor | None, kind: torch.dtype | None = None) -> Tensor:
    """Return by how much rounding may put off the numbers of each row (V,), root mean square, as a unit.

    Args:
        change: the update (V, d).
        start: the weights (V, d) that it is a difference of; None for a gradient.
        kind: in which numbers of the update were sent or summed; None takes its own.
    """
    own, sent = torch.finfo(change.dtype), torch.finfo(kind or change.dtype)
    sizes = (change.double().square().mean(1).sqrt() + sent.smallest_normal) * sent.eps
    if start is not None:
        sizes = sizes + start.double().square().mean(1).sqrt() * own.eps
    return RMS_ROUNDING * sizes


def rows_outside(change: Tensor, rounding: Tensor, most: int, hidden: int) -> OutsideRows | None:
    """Return the rows that leave the span of all others; None where they are in no span, or not told apart.

    Args:
        change: an update (V, d).
        rounding: of each row (V,), as `rounding_of_rows` has it.
        most: rows outside that there may be.
        hidden: dimensions that the span may have.
    """
    places = (change != 0).any(1).nonzero().flatten()
    rows = change[places].double() / rounding[places, None]  # in units of their own rounding
    large = change[places].norm(dim=1).argsort(descending=True)
    dimensions = min(hidden, change.shape[1])
    for attempt in range(ATTEMPTS):
        if attempt:
            chosen = torch.randperm(len(rows), generator=stream(attempt, "tied rows")).to(rows.device)
        else:
            chosen = large[most + dimensions :]  # the largest are those of ids looked up, or predicted
        span = _common_span(rows[chosen[: FOLDS * (2 * dimensions + SPARE)]], hidden)
        if span is None:
            continue
        outside = span.outside(rows)
        found = outside > GAP
        if span.rank and 0 < int(found.sum()) <= most:
            blurred = int(((outside > BLUR) & ~found).sum())
            return OutsideRows(places[found].cpu(), span.rank, blurred)
    return None


def _common_span(rows: Tensor, hidden: int) -> _Span | None:
    """Return the span of at most `hidden` dimensions that parts of some rows agree in; None where they do not.

    A row that is in the span of its own part alone is left out: it made that span.
    """
    if len(rows) < FOLDS * FOLDS:
        return None
    folds = [torch.arange(part, len(rows), FOLDS, device=rows.device) for part in range(FOLDS)]
    spans = [_span(rows[fold], hidden) for fold in folds]
    kept = []
    for part, fold in enumerate(folds):
        others = [span.outside(rows[fold]) for other, span in enumerate(spans) if other != part and span is not None]
        kept.append(fold[torch.stack(others).amin(0) <= GAP] if others else fold[:0])
    if not all(map(len, kept)):
        return None
    span = _span(rows[torch.cat(kept)], hidden)
    parts = [_span(rows[fold], hidden) for fold in kept]
    if span is None or any(part is None or part.rank != span.rank for part in parts):
        return None
    if span.rank >= min(rows.shape[1], *map(len, kept)):
        return None
    noise = float(span.outside(rows[torch.cat(kept)]).max())
    return replace(span, noise=max(noise, 1.0)) if noise <= MOST_NOISE else None


def _span(rows: Tensor, hidden: int) -> _Span | None:
    """Return what rows (N, d), with errors of about 1, span beyond these; None where that has more dimensions."""
    _, sizes, basis = torch.linalg.svd(rows, full_matrices=False)
    unit = math.sqrt(rows.shape[0]) + math.sqrt(rows.shape[1])
    seen = float(sizes[hidden]) if hidden < len(sizes) else math.inf
    if math.inf > seen > MOST_NOISE * unit:
        return None
    above = sizes > min(MOST_NOISE * unit, max(ABOVE_NOISE * seen, unit))
    return _Span(basis[above].mT, sizes[above])
