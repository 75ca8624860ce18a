"""What is measured beside accuracy, against the same by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from support import worlds
from torch import Tensor
from torch.nn import functional

from fl.client import Client
from fl.federation import ClientData, Federation
from fl.method import Method
from fl.methods.ditto import Ditto
from fl.methods.fedavg import FedAvg
from fl.methods.fedfomo import FedFomo
from fl.methods.fedjets import FedJETs
from fl.methods.fedper import FedPer
from fl.methods.hfedf import HFedF
from fl.methods.hyperfednet import HyperFedNet
from fl.methods.hyperfl import HyperFL
from fl.methods.hypergenfl import HyperGenFL
from fl.methods.pfedhn import PFedHN
from fl.methods.pfedla import PFedLA
from fl.simulation import diagnostics
from fl.simulation.protocol import Protocol
from fl.tensors import Tensors, dense

ALL = ("loss", "movement", "similarity", "divergence", "embeddings", "confidence", "server")


def four(method: Method, *measures: str, held_out_clients: int = 1, deeper: bool = False) -> Federation:
    data = [ClientData(worlds.images(4, "train", n), worlds.images(6, "test", n)) for n in range(4)]
    client = Client(worlds.deeper() if deeper else worlds.task(), method)
    return Federation(client, data, protocol=Protocol(held_out_clients=held_out_clients, diagnostics=measures))  # type: ignore[arg-type]


def network(run: Federation, number: int) -> dict[str, Tensor]:
    """The weights of a client's network, from what the server sends and what the client keeps."""
    params: Tensors = {**run.download(number).shared, **run.clients[number].private}
    made = run.client.method.parametrization
    return {name: value.clone() for name, value in made.network(made.lift(params), run.client.task).items()}


def flat(weights: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.flatten() for value in weights.values()])


def test_nothing_is_measured_that_nobody_asks_for() -> None:
    run = four(FedAvg.example())
    assert run.step().measured == run.record().measured == {}
    assert four(FedAvg.example(), *ALL).step(evaluate=False).measured == {}


@pytest.mark.parametrize("method", [FedAvg.example(), HyperFL.example(), FedPer.example()], ids=lambda m: m.name)
def test_the_loss_is_plain_cross_entropy_on_what_each_client_trains_on(method: Method) -> None:
    run = four(method, "loss")
    found = run.step(everyone=True).measured
    assert set(found) == {"loss", "losses"}
    for number, value in enumerate(found["losses"]):
        own = run.data[number].train
        logits = torch.func.functional_call(run.client.task.model.eval(), network(run, number), own.inputs)
        assert value == pytest.approx(float(functional.cross_entropy(logits, own.labels)), rel=1e-12)
    assert len(found["losses"]) == 3
    assert found["loss"] == pytest.approx(sum(found["losses"]) / 3)


def test_the_loss_of_a_personal_model_is_that_models_own() -> None:
    run = four(Ditto.example(), "loss")
    found = run.step(everyone=True).measured["losses"]
    personal = {name: dense(value) for name, value in run.clients[1].personal["parameters"].items()}
    own = run.data[1].train
    logits = torch.func.functional_call(run.client.task.model.eval(), personal, own.inputs)
    assert found[1] == pytest.approx(float(functional.cross_entropy(logits, own.labels)), rel=1e-12)


def test_weights_are_those_that_a_clients_own_hypernetwork_makes() -> None:
    run = four(HyperFL.example(), "movement", "similarity", "divergence")
    made = run.client.method.parametrization.generates(run.client.task)  # type: ignore[attr-defined]
    assert run.record().measured.keys() == {"similarity", "divergence"}  # there was no round to move in
    run.step(everyone=True)
    before = [{name: network(run, number)[name] for name in made} for number in range(3)]
    found = run.step(everyone=True).measured
    after = [{name: network(run, number)[name] for name in made} for number in range(3)]
    moved = [float((flat(new) - flat(old)).norm()) for new, old in zip(after, before, strict=True)]
    assert found["movement"] == pytest.approx(moved, rel=1e-9)
    assert min(moved) > 0
    for i, j in combinations(range(3), 2):
        cosine = float(functional.cosine_similarity(flat(after[i]), flat(after[j]), dim=0))
        assert found["similarity"][i][j] == found["similarity"][j][i] == pytest.approx(cosine, rel=1e-9)
    assert [found["similarity"][i][i] for i in range(3)] == pytest.approx([1.0] * 3)
    layers = {name.rpartition(".")[0] for name in made}
    assert set(found["divergence"]) == layers
    for layer in layers:
        own = [flat({n: v for n, v in one.items() if n.rpartition(".")[0] == layer}) for one in after]
        pairs = [float((own[i] - own[j]).norm()) for i, j in combinations(range(3), 2)]
        assert found["divergence"][layer] == pytest.approx(sum(pairs) / 3, rel=1e-9)


def test_equal_models_do_not_diverge_and_one_client_has_none_to_diverge_from() -> None:
    equal = four(FedAvg.example(), "similarity", "divergence").step(everyone=True).measured
    assert set(equal["divergence"].values()) == {0.0}
    assert equal["similarity"] == [pytest.approx([1.0] * 3)] * 3
    alone = four(FedAvg.example(), "divergence", held_out_clients=3).step().measured["divergence"]
    assert set(alone) == set(equal["divergence"])
    assert set(alone.values()) == {None}


@pytest.mark.parametrize(
    ("method", "size"),
    [
        (HyperFL.example(), 3),
        (HFedF.example(), 3),
        (PFedHN.example(), 3),
        (HyperGenFL.example(), 4),
        (PFedLA.example(), 3),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_embeddings_are_found_wherever_they_are_kept(method: Method, size: int) -> None:
    run = four(method, "embeddings")
    found = run.step(everyone=True).measured["embeddings"]
    assert len(found) == 3
    held = [*(state.private for state in run.clients[:3]), *run.server.own.values()]
    for number, own in enumerate(found):
        values = torch.tensor(own, dtype=torch.float64)
        near = [dense(v) for part in held for v in part.values() if v.shape[-1:] == values.shape and v.ndim < 3]
        rows = [row for value in near for row in value.reshape(-1, len(values))]
        assert any(torch.equal(row, values) for row in rows), number
    assert len({tuple(own) for own in found}) == 3


def test_embeddings_of_filters_are_one_after_the_other_and_without_any_there_is_no_figure() -> None:
    run = four(HyperFedNet.example(), "embeddings", deeper=True)
    found = run.step(everyone=True).measured["embeddings"]
    own = [dense(v) for name, v in run.clients[2].private.items() if name.startswith("embeddings.")]
    assert own
    assert found[2] == torch.cat([value.flatten() for value in own]).tolist()
    assert four(FedAvg.example(), "embeddings").step().measured == {}


def test_confidence_counts_every_image_once_and_apart_where_the_answer_is_wrong() -> None:
    run = four(FedAvg.example(), "confidence")
    record = run.step(everyone=True)
    found = record.measured["confidence"]
    assert set(found) == {"own", "unseen"}
    assert sum(found["own"]["right"] + found["own"]["wrong"]) == 18
    assert sum(found["unseen"]["right"] + found["unseen"]["wrong"]) == 10
    assert sum(found["own"]["right"]) == pytest.approx(6 * sum(record.accuracy or ()))
    assert not sum(found["own"]["right"][:3])  # of three classes the first has 1/3 or more
    own = run.data[3]
    logits = torch.func.functional_call(run.client.task.model.eval(), network(run, 0), own.train.inputs)
    sure = logits.softmax(-1).max(-1)
    low = sum(found["unseen"]["right"][:4]) + sum(found["unseen"]["wrong"][:4])
    assert low >= int((sure.values < 0.4).sum())


def test_a_method_that_says_nothing_of_its_servers_step_says_that() -> None:
    run = four(FedAvg.example(), "server")
    assert run.record().measured == {}  # there was no step
    assert run.step().measured == {"server": {}}


def test_a_number_of_the_servers_step_that_is_none_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FedAvg, "server_metrics", lambda *_: {"share": [0.5, float("inf"), 0.5]})
    assert four(FedAvg.example(), "server").step().measured == {"server": {"share": [0.5, None, 0.5]}}


def test_what_is_no_number_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    run = four(FedAvg.example(), "loss")
    monkeypatch.setattr(diagnostics, "loss", lambda *_: float("nan"))
    assert run.record().measured == {"loss": None, "losses": [None] * 3}


def test_who_predicts_by_the_same_weights_is_the_same() -> None:
    run = four(FedJETs.example(), "similarity", "divergence")  # everybody by all experts, whichever he trains
    for _ in range(2):
        measured = run.step(everyone=True).measured
    assert set(measured["divergence"].values()) == {0.0}
    assert [measured["similarity"][i][i] for i in range(3)] == [1.0] * 3
    for row in measured["similarity"]:
        assert row == pytest.approx([1.0] * 3)


def test_what_is_received_is_that_of_the_clients_of_the_round_to_come() -> None:
    method = replace(FedFomo.example(), downloads=2)
    data = [ClientData(worlds.images(4, "train", i), worlds.images(2, "test", i)) for i in range(4)]
    run = Federation(Client(worlds.task(), method), data, client_fraction=0.5)
    for _ in range(4):
        record = run.step(evaluate=False)
        told = max(run.download(number).numbers() for number in run.sampled_clients(run.server.round))
        assert record.numbers_down == told


def test_an_embedding_that_has_moved_is_where_it_moved_to() -> None:
    run = four(PFedLA.example(), "embeddings")
    first = run.step(everyone=True).measured["embeddings"]  # all models are the same: nothing is learned yet
    moved = run.step(everyone=True).measured["embeddings"]
    for own, before in zip(moved, first, strict=True):
        assert own != before
