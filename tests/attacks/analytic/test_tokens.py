from functools import partial

import pytest
import torch
from torch import nn

import attacks
from attacks.base import NotApplicable
from attacks.network.embeddings import lookups, unconditional_ids
from attacks.result import Remark
from defenses.noise import Noise
from defenses.prune import Prune
from defenses.qsgd import QSGD
from defenses.signsgd import SignSGD
from eval.metrics.tokens import token_scores
from fl.capture import from_batch, from_update
from fl.methods.fedavg import FedAvg
from fl.seeds import stream

IDS = torch.tensor([[3, 3, 7, 0], [11, 7, 2, 0]])
LABELS = torch.tensor([1, 0])


class Text(nn.Module):
    """A mean of embeddings and a classifier; `tied` scores ids by the embedding itself."""

    def __init__(self, *, tied: bool = False, pooled: bool = False) -> None:
        super().__init__()
        generator = stream(0, "text")
        self.embedding = nn.Embedding(20, 6, padding_idx=0)
        self.head = nn.Linear(6, 3)
        self.tied, self.pooled = tied, pooled
        with torch.no_grad():
            for value in self.parameters():
                value.normal_(0, 0.5, generator=generator)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.embedding(ids)
        if self.pooled:
            return self.head(rows.amax(1))
        return rows.mean(1) @ self.embedding.weight.T if self.tied else self.head(rows.mean(1))


@pytest.mark.parametrize(
    "method", [None, FedAvg(steps=3, batch_size=1), FedAvg(steps=1, optimizer="adam"), FedAvg(weight_decay=0.01)]
)
def test_ids_that_occur_are_read_but_for_padding(method):
    view, _ = from_batch(Text(), IDS, LABELS, method=method)
    found = attacks.build("tokens")(view)
    assert found.private["tokens/embedding.weight"].tolist() == [2, 3, 7, 11]
    assert found.verified is True
    assert found.inputs is None


def test_max_pooling_hides_ids_and_none_is_made_up():
    view, _ = from_batch(Text(pooled=True), IDS, LABELS)
    found = attacks.build("tokens")(view)
    assert {*found.private["tokens/embedding.weight"].tolist()} <= {0, 2, 3, 7, 11}


def test_nothing_is_read_where_other_rows_move_as_well():
    view, _ = from_batch(Text(), IDS, LABELS, defense=Noise(std=0.1))
    found = attacks.build("tokens")(view)
    assert isinstance(found, NotApplicable)
    assert found.reason.startswith("every row of the embeddings moved")


def test_ids_are_read_where_the_embedding_scores_the_outputs_as_well():
    view, _ = from_batch(Text(tied=True), IDS, LABELS, head="embedding.")
    found = attacks.build("tokens")(view)
    assert found.private["tokens/embedding.weight"].tolist() == [2, 3, 7, 11]
    assert found.verified


def test_ids_of_an_update_by_an_unknown_rule_are_not_confirmed():
    view, _ = from_batch(Text(), IDS, LABELS)
    unstated = from_update(Text(), view.update, input_shape=IDS[:1], batch_size=2)
    found = attacks.build("tokens")(unstated)
    assert found.private["tokens/embedding.weight"].tolist() == [2, 3, 7, 11]
    assert found.verified is None
    assert "the optimizer or the defense was not stated" in found.note


class NextWord(nn.Module):
    """Skip-gram of word2vec: scores all words by the embedding of one."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(40, 8), nn.Linear(8, 40, bias=bias)
        with torch.no_grad():
            for value in self.parameters():
                value.normal_(0, 0.5, generator=stream(0, "words"))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids)[:, 0])


def test_labels_of_a_batch_are_told_where_they_are_proven_and_called_doubtful_where_counted():
    words, nexts = torch.tensor([[5], [5], [11]]), torch.tensor([7, 9, 5])
    proven = attacks.build("tokens")(from_batch(NextWord(bias=True), words, nexts)[0])
    assert sorted(proven.labels.tolist()) == [5, 7, 9]
    assert Remark.LABELS_DOUBTFUL not in proven.remarks
    counted = attacks.build("tokens")(from_batch(NextWord(bias=True), words, nexts, method=FedAvg(steps=3))[0])
    assert Remark.LABELS_DOUBTFUL in counted.remarks
    assert "likeliest counts" in counted.note
    without = attacks.build("tokens")(from_batch(NextWord(bias=False), words, nexts)[0])
    assert without.labels is None  # embeddings have no direction in common that would stand for a bias
    assert without.verified is True


def test_what_can_not_read_ids_says_so():
    view, _ = from_batch(Text(), IDS, LABELS)
    for name in ("ig", "dlg", "rconv", "cascade", "spear", "april", "headless+ig", "surrogate+ig", "rgap", "rog"):
        found = attacks.build(name)(view)
        assert isinstance(found, NotApplicable)
        assert "`tokens` reads off" in found.reason
    images, _ = from_batch(nn.Sequential(nn.Flatten(), nn.Linear(16, 2)), torch.rand(1, 1, 4, 4), torch.tensor([1]))
    assert "no embedding" in attacks.build("tokens")(images).reason


def step_of(optimizer, *batches, zeros=slice(0)):
    """Return a model of text before the last of several batches that one optimizer takes, and what that subtracts."""
    model = Text()
    with torch.no_grad():
        model.embedding.weight[zeros] = 0  # as the row of padding is
    rule = optimizer(model.parameters())
    for ids, labels in batches:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        rule.zero_grad()
        nn.functional.cross_entropy(model(ids), labels).backward()
        rule.step()
    after = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(before)
    return model, {name: before[name] - value for name, value in after.items()}


def test_more_rows_than_ids_are_no_ids():
    earlier = torch.tensor([[13, 14, 15, 16]]), torch.tensor([2])
    rule = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    model, update = step_of(rule, earlier, (IDS[:1], LABELS[:1]))
    how = FedAvg(lr=0.1, steps=1, batch_size=None)
    found = attacks.build("tokens")(from_update(model, update, input_shape=IDS[:1], method=how))
    assert isinstance(found, NotApplicable)
    assert "6 rows of embedding.weight moved, and no more than 4 ids were fed" in found.reason
    assert found.limit


def test_rows_that_decay_moved_are_no_ids_of_an_optimizer_that_was_stated_without_it():
    model, update = step_of(partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.01), (IDS[:1], LABELS[:1]), zeros=0)
    assert (update["embedding.weight"] != 0).any(1).tolist() == [False] + [True] * 19
    stated = FedAvg(optimizer="adam", lr=1e-3, steps=1, batch_size=None)
    found = attacks.build("tokens")(from_update(model, update, input_shape=IDS[:1], method=stated))
    assert isinstance(found, NotApplicable)
    assert found.reason.startswith("every row of the embeddings moved")


@pytest.mark.parametrize("stated", [0.0, 0.9])
def test_ids_of_earlier_rounds_that_momentum_kept_are_not_confirmed(stated):
    earlier = torch.tensor([[13, 14, 0, 0]]), torch.tensor([2])
    rule = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    model, update = step_of(rule, earlier, (IDS[:1], LABELS[:1]))
    how = FedAvg(lr=0.1, steps=1, batch_size=None, momentum=stated)
    found = attacks.build("tokens")(from_update(model, update, input_shape=IDS[:1], method=how))
    assert 13 in found.private["tokens/embedding.weight"]
    assert found.verified is None
    assert "momentum kept from earlier rounds" in found.note
    alone, update = step_of(rule, (IDS[:1], LABELS[:1]))
    found = attacks.build("tokens")(from_update(alone, update, input_shape=IDS[:1], method=how))
    assert found.verified


def test_embeddings_that_shorten_their_rows_are_refused_with_what_to_do():
    model = Text()
    model.embedding.max_norm = 1.0
    sent = dict(model.named_parameters())
    for give in (lambda: from_batch(model, IDS, LABELS), lambda: from_update(model, sent, input_shape=IDS[:1])):
        with pytest.raises(ValueError, match=r"max_norm in \['embedding'\], which shortens rows in place"):
            give()


@pytest.mark.parametrize("defense", [Prune(ratio=0.6), QSGD(bits=4), SignSGD()], ids=lambda defense: defense.name)
def test_a_defense_that_changes_the_classifiers_rank_is_no_contradiction(defense):
    """A stated one may: what it does to the classifier says nothing of earlier rounds."""
    view, _ = from_batch(Text(), IDS[:1], LABELS[:1], defense=defense)
    found = attacks.build("tokens")(view)
    assert {*found.private["tokens/embedding.weight"].tolist()} <= {3, 7}
    assert found.verified
    assert "momentum" not in found.note


class Placed(nn.Module):
    """Adds learned positions to words, or to patches of a picture."""

    def __init__(self, *, pictures: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Linear(16, 6) if pictures else nn.Embedding(20, 6), nn.Embedding(32, 6)
        self.head, self.pictures = nn.Linear(6, 3), pictures
        with torch.no_grad():
            for value in self.parameters():
                value.normal_(0, 0.5, generator=stream(0, f"placed {tuple(value.shape)}"))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        words = self.words(
            given.unfold(2, 4, 4).unfold(3, 4, 4).reshape(len(given), -1, 16) if self.pictures else given
        )
        return self.head((words + self.places(torch.arange(words.shape[1], device=given.device))).tanh().mean(1))


def test_rows_that_are_looked_up_whatever_is_fed_are_no_ids_of_a_client():
    """Positions move in every client's update."""
    view, _ = from_batch(Placed(), IDS, LABELS)
    found = attacks.build("tokens")(view)
    assert found.verified
    assert {name: ids.tolist() for name, ids in found.private.items()} == {"tokens/words.weight": [0, 2, 3, 7, 11]}
    assert token_scores(found.private, view.task, view.task.inputs.pack(IDS, torch.float32))["tokens"] == 5
    view, _ = from_batch(Placed(pictures=True), torch.rand(2, 1, 16, 16, generator=stream(0, "pictures")), LABELS)
    found = attacks.build("tokens")(view)
    assert isinstance(found, NotApplicable)
    assert found.reason.startswith("what moved of places.weight is looked up whatever the client feeds")


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_ids_of_earlier_rounds_that_adam_kept_are_not_confirmed(count, amsgrad):
    earlier = torch.tensor([[13, 14, 0, 0], [13, 0, 0, 0]])[:count], torch.tensor([2, 1])[:count]
    rule = partial(torch.optim.Adam, lr=1e-2, amsgrad=amsgrad)
    how = FedAvg(lr=1e-2, optimizer="adam", steps=1, batch_size=None)
    for rounds, words in (([earlier], "times what the first step of adam at lr 0.01 makes"), ([], "")):
        model, update = step_of(rule, *rounds, (IDS[:count], LABELS[:count]))
        found = attacks.build("tokens")(
            from_update(model, update, input_shape=IDS[:1], batch_size=count, method=how, head="head.")
        )
        assert (13 in found.private["tokens/embedding.weight"]) is bool(rounds)
        assert found.verified is (None if rounds else True)
        assert words in found.note


class Scored(nn.Module):
    """Scores every word by itself, and takes the largest of each class: classes look at different words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 6), nn.Linear(6, 3)
        with torch.no_grad():
            for value in self.parameters():
                value.normal_(0, 0.5, generator=stream(0, f"scored {tuple(value.shape)}"))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids)).amax(1)


def test_a_classifier_that_looks_at_several_words_of_an_example_is_no_contradiction():
    view, _ = from_batch(Scored(), torch.tensor([[3, 7, 11, 2]]), LABELS[:1])
    found = attacks.build("tokens")(view)
    assert found.verified
    assert not found.note


def test_a_classifier_that_was_sent_in_few_bits_is_no_contradiction():
    model = Text()
    nn.functional.cross_entropy(model(IDS[:1]), LABELS[:1]).backward()
    sent = {name: value.grad for name, value in model.named_parameters()}
    step = sent["head.weight"].abs().max() / 7
    sent["head.weight"] = (sent["head.weight"] / step).round() * step
    how = FedAvg(lr=1.0, steps=1, batch_size=None)
    found = attacks.build("tokens")(from_update(model, sent, input_shape=IDS[:1], method=how))
    assert found.verified
    assert "momentum" not in found.note


class Distinct(nn.Module):
    """Looks up every word once, however often it occurs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 6), nn.Linear(6, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(torch.unique(ids)).mean(0, keepdim=True)).expand(len(ids), -1)


def test_a_network_that_looks_up_each_id_once_is_not_said_to_look_up_fewer():
    ids = torch.tensor([[3, 5, 7, 9]])
    view, _ = from_batch(Distinct(), ids, LABELS[:1])
    found = attacks.build("tokens")(view)
    assert found.private["tokens/embedding.weight"].tolist() == ids[0].tolist()
    assert found.verified


class Branching(nn.Module):
    """Looks up a second embedding for examples that begin with some of the ids alone."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.words, self.rare = nn.Embedding(100, 6), nn.Embedding(100, 6)
        self.head, self.least = nn.Linear(6, 3), least

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows, chosen = self.words(ids).mean(1), ids[:, 0] >= self.least
        if bool(chosen.any()):
            rows = rows.index_add(0, chosen.nonzero()[:, 0], self.rare(ids[chosen]).mean(1))
        return self.head(rows)


def test_as_many_rows_may_move_as_a_batch_of_the_examples_that_look_up_most_has():
    ids = torch.arange(60, 84).view(4, 6)
    found = attacks.build("tokens")(from_batch(Branching(60), ids, torch.tensor([0, 1, 2, 0]))[0])
    assert found.private["tokens/rare.weight"].tolist() == ids.flatten().tolist()
    assert found.verified


class Rare(Branching):
    """Looks up the second embedding where an example begins with one id."""

    def __init__(self) -> None:
        super().__init__(0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) if bool((ids[:, 0] == 37).any()) else self.head(self.words(ids).mean(1))


def test_ids_of_an_embedding_that_no_example_made_up_reaches_are_not_confirmed():
    found = attacks.build("tokens")(from_batch(Rare(), torch.tensor([[37, 5, 6]]), LABELS[:1])[0])
    assert found.private["tokens/rare.weight"].tolist() == [5, 6, 37]
    assert found.verified is None
    assert "looks anything up in rare.weight" in found.note


def test_a_batch_in_which_all_ids_occur_is_named():
    model = nn.Sequential(nn.Embedding(4, 6), nn.Flatten(), nn.Linear(24, 2))
    found = attacks.build("tokens")(from_batch(model, torch.arange(4)[None], LABELS[:1])[0])
    assert isinstance(found, NotApplicable)
    assert "ids of all rows in one batch" in found.reason


def test_what_is_looked_up_for_all_examples_is_asked_once():
    calls = []

    class Counted(Text):
        def forward(self, ids):
            calls.append(len(ids))
            return super().forward(ids)

    view, _ = from_batch(Counted(), IDS, LABELS)
    first = unconditional_ids(view.task)
    asked = len(calls)
    assert unconditional_ids(view.task) == first
    assert len(calls) == asked


def test_a_network_in_training_mode_keeps_its_statistics():
    model = nn.Sequential(nn.Embedding(20, 6), nn.Flatten(), nn.BatchNorm1d(18), nn.Linear(18, 3)).train()
    view, _ = from_batch(model, torch.arange(6).view(2, 3), torch.tensor([0, 1]))
    before = {name: value.clone() for name, value in view.task.model.named_buffers()}
    assert view.task.model.training
    assert attacks.build("tokens")(view).verified
    for name, value in view.task.model.named_buffers():
        assert torch.equal(value, before[name]), name


class Functional(nn.Module):
    """Looks up rows of a parameter of its own."""

    def __init__(self, look_up) -> None:
        super().__init__()
        self.rows, self.head, self.look_up = nn.Parameter(torch.randn(20, 6)), nn.Linear(6, 3), look_up

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.look_up(ids, self.rows).mean(1))


@pytest.mark.parametrize(
    "look_up",
    [
        nn.functional.embedding,
        lambda ids, rows: nn.functional.embedding_bag(ids, rows)[:, None],
        lambda ids, rows: rows[ids],
        lambda ids, rows: rows.index_select(0, ids.flatten()).view(*ids.shape, -1),
        lambda ids, rows: torch.index_select(rows, 0, ids.flatten()).view(*ids.shape, -1),
    ],
    ids=["embedding", "bag", "brackets", "method", "index_select"],
)
def test_ids_are_read_off_rows_that_functions_look_up(look_up):
    view, _ = from_batch(Functional(look_up), IDS, LABELS)
    found = attacks.build("tokens")(view)
    assert found.private["tokens/rows"].tolist() == IDS.unique().tolist()
    assert found.verified
    assert token_scores(found.private, view.task, view.task.inputs.pack(IDS, torch.float32))["tokens_recall"] == 1


def test_rows_of_a_modules_weight_that_a_function_looks_up_are_counted_once():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(20, 6), nn.Linear(6, 3)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(nn.functional.embedding(ids, self.words.weight).mean(1))

    view, _ = from_batch(Both(), IDS, LABELS)
    found = attacks.build("tokens")(view)
    assert found.private["tokens/words.weight"].tolist() == IDS.unique().tolist()
    assert found.verified
    text, _ = from_batch(Text(), IDS, LABELS)
    for one in (view, text):
        (looked_up,) = lookups(one.task, one.task.inputs.pack(IDS, torch.float32)).values()
        assert len(looked_up) == IDS.numel()


def test_ids_of_a_parameter_that_no_example_made_up_reaches_are_scored():
    class RareRows(Rare):
        def __init__(self) -> None:
            super().__init__()
            del self.rare
            self.rows = nn.Parameter(torch.randn(100, 6))

        def rare(self, ids: torch.Tensor) -> torch.Tensor:
            return self.rows[ids]

    ids = torch.tensor([[37, 5, 6]])
    view, _ = from_batch(RareRows(), ids, LABELS[:1])
    scores = token_scores(attacks.build("tokens")(view).private, view.task, view.task.inputs.pack(ids, torch.float32))
    assert scores["tokens_precision"] == 1


class Siblings(nn.Module):
    """Scores pairs of ids by one table, which two names have in common."""

    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(20, 4)
        self.items = self.users
        self.head = nn.Linear(8, 5)

    def forward(self, ids):
        return self.head(torch.cat([self.users(ids[:, 0].long()), self.items(ids[:, 1].long())], 1))


def test_a_table_that_has_two_names_keeps_its_parameters():
    """Attacks that came after `tokens` ended with an error, as the model's weights were no parameters any more."""
    model = Siblings()
    view, _ = from_batch(model, torch.tensor([[3, 7]]), torch.tensor([1]))
    before = dict(view.task.model.named_parameters())
    found = attacks.build("tokens")(view)
    assert found.verified
    assert found.private["tokens/users.weight"].tolist() == [3, 7]
    assert all(value is before[name] for name, value in view.task.model.named_parameters())
