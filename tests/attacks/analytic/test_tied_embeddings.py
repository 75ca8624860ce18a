import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attacks
from attacks.analytic.tied_embeddings import rounding_of_rows, rows_outside
from attacks.base import NotApplicable
from defenses.clip import Clip
from defenses.noise import Noise
from defenses.prune import Prune
from eval.metrics.tokens import token_scores
from fl.capture import from_batch, from_update
from fl.methods.fedavg import FedAvg
from fl.seeds import stream

WORDS, WIDTH = 300, 48
IDS = torch.randint(1, WORDS, (2, 8), generator=stream(0, "tied ids"))
NEXT = torch.randint(1, WORDS, (2, 8), generator=stream(1, "tied ids"))
NAME = "tokens/words.weight"


class Language(nn.Module):
    """A small language model of one causal layer, whose embedding scores the next word."""

    def __init__(self, style: str = "function") -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(32, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.norm, self.style = nn.LayerNorm(WIDTH), style
        with torch.no_grad():
            for name, value in self.named_parameters():
                if value.ndim == 2:
                    value.normal_(0, 0.05, generator=stream(0, f"language {name}"))
        if style == "module":
            self.scores = nn.Linear(WIDTH, WORDS, bias=False)
            self.scores.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        steps = torch.arange(ids.shape[1], device=ids.device)
        x = self.words(ids) + self.places(steps)
        states = self.norm(x + self.attention(x, x, x, attn_mask=steps[None] > steps[:, None], need_weights=False)[0])
        if self.style == "module":
            logits = self.scores(states)
        else:
            weight = self.words.weight
            logits = F.linear(states, weight) if self.style == "function" else states @ weight.T
        return logits.mT


def next_word(outputs: Tensor, ids: Tensor) -> Tensor:
    """Compares outputs with the ids that follow, as transformers' models of language do."""
    return F.cross_entropy(outputs[..., :-1], ids[:, 1:])


def gradient_of(model: nn.Module, ids: Tensor, targets: Tensor) -> dict[str, Tensor]:
    values = dict(model.named_parameters())
    made = torch.autograd.grad(F.cross_entropy(model(ids), targets), [*values.values()])
    return dict(zip(values, made, strict=True))


@pytest.mark.parametrize("style", ["module", "function", "product"])
@pytest.mark.parametrize("loss", ["segmentation", next_word])
def test_ids_are_read_off_tied_weights_however_they_are_written(style, loss):
    view, _ = from_batch(Language(style), IDS, IDS if loss is next_word else NEXT, loss=loss)
    found = attacks.build("tokens")(view)
    fed = IDS[:, :-1] if loss is next_word else IDS  # nothing flows back into the last word
    assert found.private[NAME].tolist() == fed.unique().tolist()
    assert found.private.keys() == {NAME}  # and no positions
    assert found.verified
    scores = token_scores(found.private, view.task, view.task.inputs.pack(IDS, torch.float32))
    assert scores["tokens"] == len(IDS.unique())
    assert scores["tokens_precision"] == 1


@pytest.mark.parametrize("rounded", [False, True])
def test_ids_are_read_off_a_captured_gradient_or_difference(rounded):
    model = Language()
    update = gradient_of(model, IDS, NEXT)
    if rounded:
        update = {name: value.detach() - (value.detach() - update[name]) for name, value in model.named_parameters()}
    how = FedAvg(lr=1.0, steps=1, batch_size=None)
    view = from_update(model, update, input_shape=IDS[:1], batch_size=2, loss="segmentation", method=how)
    found = attacks.build("tokens")(view)
    assert found.private[NAME].tolist() == IDS.unique().tolist()
    assert found.verified
    unstated = from_update(model, update, input_shape=IDS[:1], batch_size=2, loss="segmentation")
    found = attacks.build("tokens")(unstated)
    assert found.private[NAME].tolist() == IDS.unique().tolist()
    assert found.verified is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": FedAvg(steps=1, optimizer="adam")}, "rescales every number apart (Adam) leaves none"),
        ({"defense": Noise(std=0.1)}, "the defense noise changes that"),
        ({"defense": Prune(ratio=0.5)}, "the defense prune changes that"),
        ({"defense": Noise(std=0.1), "threat": {"knows_defense": False}}, "clearly: noise, numbers of few bits"),
    ],
)
def test_what_hides_the_span_of_hidden_states_is_named(settings, words):
    view, _ = from_batch(Language(), IDS, NEXT, loss="segmentation", **settings)
    found = attacks.build("tokens")(view)
    assert isinstance(found, NotApplicable)
    assert words in found.reason


def test_ids_are_not_confirmed_where_the_defense_is_not_known():
    view, _ = from_batch(Language(), IDS, NEXT, loss="segmentation", threat={"knows_defense": False})
    found = attacks.build("tokens")(view)
    assert found.private[NAME].tolist() == IDS.unique().tolist()
    assert found.verified is None


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mixed", [False, True])
def test_ids_are_read_off_gradients_in_half_precision(kind, mixed):
    model, ids = Language(), IDS[:1, :4]
    with torch.autocast("cpu", kind, enabled=mixed):
        outputs = model(ids)
    values = dict(model.named_parameters())
    made = torch.autograd.grad(F.cross_entropy(outputs.float(), NEXT[:1, :4]), [*values.values()])
    update = {name: (value if mixed else value.to(kind)).float() for name, value in zip(values, made, strict=True)}
    how = FedAvg(lr=1.0, steps=1, batch_size=None)
    view = from_update(model, update, input_shape=ids, loss="segmentation", method=how)
    found = attacks.build("tokens")(view)
    assert found.private[NAME].tolist() == ids.unique().tolist()
    assert found.verified is None
    assert "few bits" in found.note


@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_clipping_leaves_the_span(scope):
    view, _ = from_batch(Language(), IDS, NEXT, loss="segmentation", defense=Clip(max_norm=1e-2, scope=scope))
    found = attacks.build("tokens")(view)
    assert found.private[NAME].tolist() == IDS.unique().tolist()
    assert found.verified


def test_more_hidden_states_than_numbers_of_a_row_leave_no_room():
    ids = IDS.repeat(4, 1)
    view, _ = from_batch(Language(), ids, NEXT.repeat(4, 1), loss="segmentation")
    found = attacks.build("tokens")(view)
    assert isinstance(found, NotApplicable)
    assert "the 64 hidden states that score them, and these may fill all 48 dimensions" in found.reason


@pytest.mark.parametrize(("method", "words"), [(FedAvg(steps=2), "several steps"), (FedAvg(momentum=0.9), "momentum")])
def test_hidden_states_of_other_steps_keep_ids_from_being_confirmed(method, words):
    view, _ = from_batch(Language(), IDS, NEXT, loss="segmentation", method=method)
    found = attacks.build("tokens")(view)
    assert {*found.private[NAME].tolist()} <= {*IDS.unique().tolist()}
    assert found.verified is None
    assert words in found.note


def test_a_word_that_the_network_is_sure_of_is_not_confirmed_as_fed():
    """Of a word that only its own row shows the span of the others knows nothing."""
    generator = stream(0, "sure")
    states = torch.randn(6, WIDTH, generator=generator)
    flows = torch.rand(WORDS, 6, generator=generator) / WORDS
    flows[:, 5] = 0
    flows[7, 5], flows[9, 5] = -0.5, 0.5
    change = flows @ states
    fed = [3, 9, 20]
    change[fed] += torch.randn(3, WIDTH, generator=generator)
    found = rows_outside(change, rounding_of_rows(change, None), 6, 6)
    assert found.ids.tolist() == [3, 7, 9, 20]
    assert found.rank == 5  # by which the caller knows
    flows[:, 5] += 1e-3
    change = flows @ states
    change[fed] += torch.randn(3, WIDTH, generator=generator)
    found = rows_outside(change, rounding_of_rows(change, None), 6, 6)
    assert (found.ids.tolist(), found.rank) == (fed, 6)


def test_words_that_are_predicted_and_ignored_are_not_confirmed():
    """Targets of padding are ignored: fewer hidden states show than a batch has."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, ignore_index=-100)

    targets = NEXT.clone()
    targets[1, 4:] = -100
    found = attacks.build("tokens")(from_batch(Language(), IDS, targets, loss=loss)[0])
    assert {*found.private[NAME].tolist()} <= {*IDS.unique().tolist()}
    assert found.verified is None
    assert "show 12 of 16 hidden states" in found.note


def test_rows_of_which_none_shows_a_hidden_state_tell_nothing():
    change = 1e-30 * torch.randn(WORDS, WIDTH, generator=stream(0, "quiet"))
    change[5] = 1.0
    rounding = rounding_of_rows(change, torch.ones(WORDS, WIDTH))
    assert rows_outside(change, rounding, 10, 10) is None


def test_a_random_update_has_no_rows_outside():
    change = torch.randn(WORDS, WIDTH, generator=stream(0, "noise"))
    assert rows_outside(change, rounding_of_rows(change, None), 10, 10) is None
    for few in (0, 1, 4, 20, 40):
        assert rows_outside(change[:few], rounding_of_rows(change[:few], None), 10, 10) is None


@pytest.mark.parametrize("seed", range(12))
def test_nothing_but_what_was_fed_is_confirmed_of_networks_that_trained(seed):
    generator = stream(seed, "trained language")
    ids = torch.randint(0, WORDS, (2, 6), generator=generator)
    targets = torch.randint(0, WORDS, (2, 6), generator=generator)
    if seed % 2:
        targets[0] = ids[0].flip(0)
    model = Language()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(seed * 8):
        optimizer.zero_grad()
        F.cross_entropy(model(ids), targets).backward()
        optimizer.step()
    lr, update = (1.0, 0.1, 1e-2)[seed % 3], gradient_of(model, ids, targets)
    sent = {name: value.detach() - (value.detach() - lr * update[name]) for name, value in model.named_parameters()}
    how = FedAvg(lr=lr, steps=1, batch_size=None)
    view = from_update(model, sent, input_shape=ids[:1], batch_size=2, loss="segmentation", method=how)
    found = attacks.build("tokens")(view)
    if not isinstance(found, NotApplicable) and found.verified:
        assert {*found.private[NAME].tolist()} <= {*ids.unique().tolist()}


class SharedInside(nn.Module):
    """Compares a mean of embeddings with all words, and classifies by the largest similarities or by all of them."""

    def __init__(self, classes: int, *, sharp: bool = False) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(200, 16), nn.Linear(201, classes)
        self.sharp = sharp
        with torch.no_grad():
            for name, value in self.named_parameters():
                value.normal_(0, 0.5, generator=stream(0, f"inside {name}"))

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.words(ids)
        near = (rows.mean(1) @ self.words.weight.T).tanh()
        last = (rows.prod(1) if self.sharp else rows.sum(1)) @ self.words.weight.T
        return self.head(torch.cat([near, last.amax(1, keepdim=True)], 1))


@pytest.mark.parametrize("classes", [3, 200])
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"defense": Prune(ratio=0.5)}, "moves, as another layer uses it as well; ids are told by the span"),
        ({"method": FedAvg(steps=1, optimizer="adam")}, "moves, as another layer uses it as well; ids are told by"),
        ({}, "how many hidden states meet the rows of words.weight is not known, as another layer uses it as well"),
    ],
)
def test_a_layer_inside_that_shares_the_weight_is_no_head(settings, told, classes):
    ids, labels = torch.tensor([[3, 3, 7, 0], [11, 7, 2, 0]]), torch.tensor([1, 0])
    found = attacks.build("tokens")(from_batch(SharedInside(classes), ids, labels, **settings)[0])
    assert told in (found.reason if isinstance(found, NotApplicable) else found.note)


def test_a_word_that_a_layer_inside_reaches_alone_is_not_confirmed_as_fed():
    """As many classes as words would let its hidden states be counted as those of the outputs."""
    ids, labels = torch.tensor([[3, 3, 7, 0], [11, 7, 2, 0]]), torch.tensor([1, 0])
    found = attacks.build("tokens")(from_batch(SharedInside(200, sharp=True), ids, labels)[0])
    assert {*found.private[NAME].tolist()} > {*ids.flatten().tolist()}
    assert not found.verified
