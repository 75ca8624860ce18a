from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from reference.hfedf_round import Server, Table8, client_update, grad_align, table9
from support import worlds
from support.compare import assert_near, assert_same

from defenses.dp_sgd import DPSGD
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.methods.fedavg import FedAvg
from fl.methods.hfedf import HFedF, alignment
from fl.models import build
from fl.models.hypernetworks.server_hypernetwork import EMBEDDINGS, HYPERNETWORK
from fl.predict import predict
from fl.seeds import stream
from fl.simulation.client_round import Round
from fl.simulation.protocol import Protocol
from fl.tensors import dense
from fl.types import Task

SMALL: dict[str, Any] = {"input_shape": (1, 8, 8), "channels": (3, 4), "widths": (2, 3, 2), "hidden": 6}


@cache
def task(dropout: float = 0.25) -> Task:
    return build("hfedf-cnn", num_classes=worlds.CLASSES, dropout=dropout, **SMALL).to(dtype=torch.float64)


def method(**settings: Any) -> HFedF:
    given = {"lr": 0.05, "epochs": 2, "batch_size": 2, "hidden": (5, 4), "warmup": 0, "server_lr": 0.02, **settings}
    return HFedF(**given)


def reference(run: Federation, rule: HFedF) -> Server:
    own = run.server.own[HYPERNETWORK]
    hypernet = Table8({k: v.shape for k, v in task().parameters.items()}, 3, rule.embedding or 1, rule.hidden).double()
    with torch.no_grad():
        for name, value in hypernet.named().items():
            value.copy_(dense(own[name]))
    moving = [p for n, p in hypernet.named().items() if n != EMBEDDINGS or rule.embeddings == "learned"]
    adam = torch.optim.Adam(moving, lr=rule.server_lr, weight_decay=rule.server_decay)
    climbs, sign = rule.align == "as-printed", {"away": -1.0, "off": 0.0}.get(rule.align, 1.0)
    return Server(hypernet, sign, rule.ema, rule.warmup, adam, climbs)


def batches(done: Round, rule: HFedF) -> list[Any]:
    trace, (mean, std) = done.trace, task().normalization(done.trace.inputs)
    return [
        ((trace.inputs[index] - mean) / std, trace.labels[index], draws.get("body.drop.mask"))
        for (index,), draws in zip(trace.order[0], trace.draws[0], strict=True)
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"align": "away", "embedding": 3},
        {"align": "off", "ema": 0.75, "warmup": 1, "server_decay": 0.1},
        {"embeddings": "fixed", "ema": 1.0},
        {"align": "as-printed"},
    ],
)
@pytest.mark.parametrize("chosen", [[0, 1, 2], [0, 2]])
def test_rounds_equal_the_published_ones(settings: dict[str, Any], chosen: list[int]) -> None:
    rule = method(**settings)
    run = worlds.federation(rule, task_=task(), rounds=0)
    server = reference(run, rule)
    for t in range(3):
        sent = {i: {k: v.detach() for k, v in server.hypernet(i).items()} for i in chosen}
        for i in chosen:
            assert_near(run.download(i).shared, sent[i], 1e-10)
        rounds = run.run_round(chosen)
        trained = {
            i: client_update(sent[i], batches(done, rule), lr=rule.lr, weight_decay=rule.weight_decay)
            for i, done in zip(chosen, rounds, strict=True)
        }
        server.round(t, sent, trained)
        assert_near(run.server.own[HYPERNETWORK], server.hypernet.named(), 1e-10)
    assert run.server.round == 3


def test_pull_back_is_the_gradient_of_the_loss_after_the_hypernetwork() -> None:
    rule = method(steps=1, batch_size=None, weight_decay=0.0)
    run = worlds.federation(rule, task_=task(0.0), rounds=0)
    done = run.train(1)
    pulled = rule.generator(run.client.task, 3).pull_back_update(run.server.own[HYPERNETWORK], 1, done.upload.update)
    images = run.data[1].train
    mean, std = task().normalization(images.inputs)

    def loss(own: dict[str, Any]) -> float:
        made = rule.generator(run.client.task, 3).generate(own, dense(own[EMBEDDINGS])[1])
        logits = table9(made, (images.inputs - mean) / std, None)
        return float(torch.nn.functional.cross_entropy(logits, images.labels))

    own = run.server.own[HYPERNETWORK]
    generator = stream(0, "direction")
    for name, value in own.items():
        step = torch.randn(dense(value).shape, generator=generator, dtype=torch.float64)
        step[...] /= step.norm() * 1e6
        slope = (loss({**own, name: value + step}) - loss({**own, name: value + step * -1.0})) / 2
        expected = float((dense(pulled[name]) * step).sum()) / rule.lr
        assert slope == pytest.approx(expected, rel=1e-3, abs=1e-12), name


@pytest.mark.parametrize(("align", "falls"), [("toward", True), ("as-printed", False)])
def test_a_round_lowers_the_clients_loss_but_for_algorithm_1_as_printed(align: Any, falls: bool) -> None:
    rule = method(align=align, steps=1, batch_size=None, weight_decay=0.0, server_lr=1e-4, server_decay=0.0)
    run = worlds.federation(rule, task_=task(0.0), rounds=0)

    def loss() -> float:
        total = 0.0
        for number, data in enumerate(run.data):
            mean, std = task().normalization(data.train.inputs)
            logits = table9(run.download(number).shared, (data.train.inputs - mean) / std, None)
            total += float(torch.nn.functional.cross_entropy(logits, data.train.labels))
        return total

    before = loss()
    run.run_round()
    assert (loss() < before) == falls


@pytest.mark.parametrize(("align", "sign"), [("toward", 1.0), ("away", -1.0), ("off", 0.0), ("as-printed", 1.0)])
def test_gradalign_equals_the_papers_formula(align: Any, sign: float) -> None:
    gradients = torch.randn(4, 6, generator=stream(0, "gradients"), dtype=torch.float64)
    weights = alignment([{"a": g[:2], "b": g[2:]} for g in gradients], align)
    torch.testing.assert_close(weights, torch.stack(grad_align(list(gradients), sign)), rtol=1e-12, atol=0)
    assert float(weights.sum()) == pytest.approx(1)
    if align == "toward":  # the odd one out counts least
        odd = alignment([{"a": torch.tensor(v)} for v in ([1.0, 0.0], [1.0, 0.1], [-1.0, 0.0])], align)
        assert odd.argmin() == 2


@pytest.mark.parametrize("settings", [{}, {"align": "away"}, {"embeddings": "fixed"}])
def test_what_each_round_weighted_clients_by_can_be_had(settings: dict[str, Any]) -> None:
    data = [ClientData(worlds.images(4, "train", i), worlds.images(2, "test", i)) for i in range(4)]
    rule = method(**settings)
    run = Federation(Client(task(), rule), data, client_fraction=0.5, protocol=Protocol(diagnostics=("server",)))
    assert run.record().measured == {}
    for _ in range(2):
        chosen, before = run.sampled_clients(run.server.round), run.server.own[HYPERNETWORK]
        made = rule.generator(task(), 4)
        uploads = [run.train(number).upload for number in chosen]
        record = run.step()
        pulled = [{k: dense(v) for k, v in made.pull_back_update(before, u.client, u.update).items()} for u in uploads]
        names = [n for n in before if n != EMBEDDINGS]
        parts = {"alignment": [torch.cat([one[n].flatten() for n in names]) for one in pulled]}
        if rule.embeddings == "learned":
            parts["alignment of embeddings"] = [one[EMBEDDINGS].flatten() for one in pulled]
        found = record.measured["server"]
        assert record.clients == tuple(chosen)
        assert set(found) == set(parts)
        for name, part in parts.items():
            expected = grad_align(part, -1.0 if rule.align == "away" else 1.0)
            assert found[name] == pytest.approx([float(w) for w in expected], rel=1e-10), name
            assert len(set(found[name])) == 2


def test_weights_are_recorded_of_scored_rounds_alone_and_change_no_bit() -> None:
    data = [ClientData(worlds.images(4, "train", i), worlds.images(2, "test", i)) for i in range(2)]
    asking, plain = (
        Federation(Client(task(), method()), data, protocol=Protocol(diagnostics=m)) for m in (("server",), ())
    )
    assert asking.step(evaluate=False).measured == {}
    assert "server" in asking.step().measured
    assert "server" not in asking.step(evaluate=False).measured
    assert asking.record().measured == {}  # nothing is left from a round before the last
    for _ in range(3):
        assert plain.step().measured == {}
    assert_same(asking.server.own[HYPERNETWORK], plain.server.own[HYPERNETWORK])
    assert method().server_metrics(asking.server, [], task()) == {}


def test_no_client_moved_is_no_number_lost() -> None:
    weights = alignment([{"a": torch.zeros(3)}, {"a": torch.zeros(3)}], "toward")
    assert weights.tolist() == [0.5, 0.5]


def test_embeddings_learned_fixed_and_drawn_anew() -> None:
    ends = {}
    for kind in ("learned", "fixed", "random"):
        run = worlds.federation(method(embeddings=kind), task_=task(), rounds=0)
        before = dense(run.server.own[HYPERNETWORK][EMBEDDINGS]).clone()
        moved = []
        for _ in range(2):
            run.run_round()
            moved.append(dense(run.server.own[HYPERNETWORK][EMBEDDINGS]).clone())
        ends[kind] = (before, *moved)
    before = ends["learned"][0]
    assert torch.equal(ends["fixed"][2], before)
    assert 0 < float((ends["learned"][2] - before).abs().max()) < 0.1  # two steps of Adam of 0.02
    assert all(float((a - b).abs().min()) > 1e-3 for a, b in zip(ends["random"][1:], ends["random"][:2], strict=True))
    assert abs(float(ends["random"][2].std()) - 1) < 0.9


def test_the_embedding_has_the_published_size() -> None:
    for clients, size in ((3, 1), (4, 2), (6, 2), (12, 4)):
        assert HFedF().generator(task(), clients).embedding == size


def test_an_outsider_gets_the_mean_embeddings_model_or_the_mean_model() -> None:
    run = worlds.federation(method(), task_=task())
    own = run.server.own[HYPERNETWORK]
    made = HFedF(hidden=(5, 4)).generator(task(), 3).generate(own, dense(own[EMBEDDINGS]).mean(0))
    assert_same(run.client.method.broadcast(run.server, 3, task()).shared, made)
    mean = method(unseen="model").broadcast(run.server, 3, task()).shared
    every = [run.download(i).shared for i in range(3)]
    assert_near(mean, {k: (every[0][k] + every[1][k] + every[2][k]) / 3 for k in mean}, 1e-12)
    assert any(not torch.equal(dense(mean[k]), made[k]) for k in made)


def test_adam_on_the_clients() -> None:
    run = worlds.federation(method(optimizer="adam"), task_=task(), rounds=0)
    update = run.train(0).upload.update
    assert max(float(dense(v).abs().max()) for v in update.values()) <= 4 * 0.05 * 1.01  # four steps of at most lr


@pytest.mark.parametrize("settings", [{"ema": 0.0}, {"ema": 1.1}, {"warmup": -1}])
def test_settings_out_of_range(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"(ema|warmup): expected a"):
        HFedF(**settings)


# ---- the client network ----------------------------------------------------------------------------------------------
def test_the_network_is_table_9() -> None:
    found = build("hfedf-cnn", num_classes=7)
    shapes = {n: tuple(p.shape) for n, p in found.model.named_parameters() if n.endswith("weight")}
    assert shapes["body.inception2.conv1.weight"] == (32, 176, 1, 1)
    assert shapes["body.fc1.weight"] == (256, 2592)
    # by hand from Table 9: 896 + 1,056 + 18,496, inception 64,624 and 177,520, 663,808, 1,799
    assert sum(p.numel() for p in found.parameters.values()) == 928_199
    images = torch.rand(2, 3, 32, 32, generator=stream(0, "images"))
    mean, std = found.normalization(images)
    torch.testing.assert_close(found.model(images), table9(found.parameters, (images - mean) / std, None))


def test_the_hypernetworks_size_follows_from_tables_8_and_9() -> None:
    published = HFedF().generator(build("hfedf-cnn", num_classes=7), 3)
    layers = (1 * 50 + 50) + 3 * (50 * 50 + 50)
    assert layers + 51 * sum(s.numel() for s in published.shapes.values()) == 47_345_899
    small = replace(published, shapes={"a": torch.Size([3, 2])})
    assert sum(dense(v).numel() for v in small.initial_parameters(stream(0, "x")).values()) == layers + 51 * 6


# ---- dropout ---------------------------------------------------------------------------------------------------------
def test_masks_are_recorded_and_replayed() -> None:
    run = worlds.federation(method(), task_=task(0.5), rounds=0)
    view, truth = run.observe(0)
    drawn = [step["body.drop.mask"] for step in truth.trace.draws[0]]
    features = task().parameters["body.fc1.weight"].shape[1]
    assert all(mask.shape == (2, features) for mask in drawn)
    values = torch.cat(drawn)
    assert set(values.unique().tolist()) == {0.0, 2.0}
    assert abs(float((values > 0).double().mean()) - 0.5) < 0.1
    assert not torch.equal(drawn[0], drawn[1])
    assert_same(predict(view, truth.candidate()), view.update)
    guess = predict(view, replace(truth.candidate(), draws=None))  # who does not know the masks leaves them out
    assert any(not torch.equal(dense(guess[k]), dense(v)) for k, v in view.update.items())


def test_dropout_is_off_in_evaluation_and_refused_without_masks() -> None:
    model = task(0.5).model
    images = worlds.images(2).inputs
    assert torch.equal(model.eval()(images), task(0.0).model.eval()(images))
    with pytest.raises(ValueError, match="a method that draws masks"):
        worlds.federation(FedAvg.example(), task_=task(0.5))
    with pytest.raises(ValueError, match=r"dropout: expected a number in \[0, 1\), got 1"):
        build("hfedf-cnn", num_classes=3, dropout=1.0)


def test_masks_add_no_number_to_what_travels() -> None:
    rows = [worlds.federation(method(), task_=task(p), rounds=0).download(0).numbers() for p in (0.0, 0.5)]
    assert rows[0] == rows[1]


def test_an_outsider_is_scored_on_all_its_images() -> None:
    data = [ClientData(worlds.images(4, "train", i), worlds.images(4, "test", i)) for i in range(3)]
    run = Federation(Client(task(), method()), data, seed=0, protocol=Protocol(held_out_clients=1))
    record = run.step()
    assert record.clients == (0, 1)
    assert len(dense(run.server.own[HYPERNETWORK][EMBEDDINGS])) == 2
    network = run.client.network(run.download(2).shared, task().buffers)
    network.model.eval()
    right = [network(part.inputs).argmax(-1) == part.labels for part in (data[2].train, data[2].test)]
    assert record.further["unseen"] == (float(torch.cat(right).double().mean()),)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_each_image_is_clipped_alike_whether_there_is_noise_or_none(dropout: float) -> None:
    updates = []
    for noise in (0.0, 1e-12):
        client = Client(task(dropout), method(), DPSGD(clip=0.5, noise_multiplier=noise))
        own = worlds.images(4, "clipped")
        updates.append(Federation(client, [ClientData(own, own)]).train(0).upload.update)
    assert_near(updates[1], updates[0], 1e-8)
