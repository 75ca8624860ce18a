from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support import worlds
from support.compare import assert_near, assert_same

from fl.client import Client
from fl.federation import ClientData, Federation
from fl.method import Method, ServerState, mean
from fl.methods.fedavg import FedAvg
from fl.methods.local import Local
from fl.simulation.accuracy import accuracy
from fl.tensors import dense
from fl.types import Batch, Upload
from fl.view import ThreatModel

METHOD = FedAvg(lr=0.1, momentum=0.5, epochs=2, batch_size=2)


def uneven(**settings: float) -> Federation:
    data = [ClientData(worlds.images(n, "train", n), worlds.images(6, "test", n)) for n in (2, 4, 6, 8)]
    return Federation(Client(worlds.task(batch_norm=True), METHOD), data, **settings)  # type: ignore[arg-type]


def test_the_server_takes_the_mean_weighted_by_images() -> None:
    run = uneven()
    before = dict(run.server.shared)
    rounds = run.run_round([0, 3])
    assert [done.upload.weight for done in rounds] == [2, 8]
    ends = [done.result.trained(before) for done in rounds]
    expected = {name: 0.2 * dense(ends[0][name]) + 0.8 * dense(ends[1][name]) for name in before}
    assert_near(run.server.shared, expected, 1e-13)
    statistics = "body.norm1.running_mean"
    mean = 0.2 * rounds[0].result.buffers[statistics] + 0.8 * rounds[1].result.buffers[statistics]
    torch.testing.assert_close(run.server.buffers[statistics], mean)
    assert run.server.buffers["body.norm1.num_batches_tracked"] == 0
    assert run.server.round == 1


def test_a_round_without_clients_changes_nothing_but_its_number() -> None:
    run = uneven()
    before = run.server
    run.run_round([])
    assert_same(run.server.shared, before.shared)
    assert run.server.round == 1


@pytest.mark.parametrize(("rate", "count"), [(1.0, 4), (0.5, 2), (0.3, 1), (0.01, 1), (0.65, 3)])
def test_so_many_clients_are_sampled_and_the_same_for_a_seed(rate: float, count: int) -> None:
    run = uneven(client_fraction=rate)
    chosen = [run.sampled_clients(round) for round in range(20)]
    assert all(len(set(numbers)) == count and numbers == sorted(numbers) for numbers in chosen)
    assert set().union(*chosen) == {0, 1, 2, 3}
    assert chosen == [uneven(client_fraction=rate).sampled_clients(round) for round in range(20)]


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1])
def test_rates_are_checked(rate: float) -> None:
    with pytest.raises(ValueError, match=r"expected client_fraction in \(0, 1\]"):
        uneven(client_fraction=rate)


def test_a_federation_needs_clients() -> None:
    with pytest.raises(ValueError, match="at least 1 client"):
        Federation(Client(worlds.task(), METHOD), [])


def test_a_run_that_goes_on_equals_one_that_never_stopped() -> None:
    whole, first = uneven(), uneven()
    for _ in range(3):
        whole.run_round()
    first.run_round()
    second = uneven()
    second.server, second.clients = first.server, list(first.clients)
    second.run_round()
    second.run_round()
    assert_same(second.server.shared, whole.server.shared)
    assert_same(second.server.buffers, whole.server.buffers)


def test_clients_do_not_depend_on_the_order_they_train_in() -> None:
    run = uneven()
    last_first = [run.train(number).upload.update for number in (3, 0)]
    assert_same(last_first[1], run.train(0).upload.update)


def test_observing_leaves_no_trace() -> None:
    run = uneven()
    before, clients = run.server, list(run.clients)
    view, truth = run.observe(1)
    assert run.server is before
    assert run.clients == clients
    assert_same(view.update, run.train(1).upload.update)
    assert torch.equal(truth.inputs, run.data[1].train.inputs)


def test_observing_other_data_and_another_rule() -> None:
    run = uneven()
    one = worlds.images(1, "one")
    client = Client(run.client.base, FedAvg(steps=1, train_mode=False))
    view, truth = run.observe(1, data=one, client=client, threat=ThreatModel(knows_labels=True))
    assert view.schedule == (((1,),),)
    assert torch.equal(truth.inputs, one.inputs)
    assert view.labels is not None
    assert torch.equal(view.labels, one.labels)


def test_local_training_shares_nothing() -> None:
    run = worlds.federation(Local(lr=0.1, epochs=2, batch_size=2))
    assert run.server.shared == {}
    assert run.train(0).upload.numbers() == 0
    assert not torch.equal(run.clients[0].private["head.bias"], run.clients[1].private["head.bias"])  # type: ignore


def test_uploads_are_counted() -> None:
    run = uneven()
    upload = run.train(0).upload
    numbers = sum(p.numel() for p in run.client.task.parameters.values())
    buffers = sum(b.numel() for b in run.client.task.buffers.values())
    assert upload.numbers() == numbers + buffers


def test_accuracy_counts_right_answers_in_evaluation_mode() -> None:
    run = uneven()
    run.run_round()
    model = run.client.base.model
    state = {**run.server.shared, **run.server.buffers}
    logits = torch.func.functional_call(model.eval(), state, (run.data[2].test.inputs,))  # type: ignore[arg-type]
    expected = float((logits.argmax(-1) == run.data[2].test.labels).double().mean())
    assert run.accuracy([2]) == [pytest.approx(expected)]
    small = accuracy(
        run.client, run.server.shared, {**run.client.task.buffers, **run.server.buffers}, run.data[2].test, size=2
    )
    assert small == pytest.approx(expected)


def test_tuned_accuracy_is_that_after_another_round_of_local_training() -> None:
    data = ClientData(worlds.images(6, "fit"), worlds.images(6, "fit"))
    run = Federation(Client(worlds.task(), FedAvg(lr=0.1, momentum=0.9, epochs=150, batch_size=6)), [data])
    before = run.server
    assert run.accuracy(tuned=True) == [1.0]
    assert run.accuracy()[0] < 1
    assert run.server is before


def test_losses_fall() -> None:
    run = worlds.federation(FedAvg(lr=0.5, epochs=5, batch_size=4), rounds=0)
    everything = Batch(torch.cat([d.train.inputs for d in run.data]), torch.cat([d.train.labels for d in run.data]))

    def loss() -> float:
        network = run.client.network(run.server.shared, {})
        return float(torch.nn.functional.cross_entropy(network(everything.inputs), everything.labels))

    before = loss()
    assert before == pytest.approx(math.log(worlds.CLASSES), abs=0.3)
    for _ in range(20):
        run.run_round()
    assert loss() < 0.7 * before


def test_a_method_without_phases_says_so() -> None:
    with pytest.raises(TypeError, match=r"define phases\(\)"):
        worlds.federation(Method())


def test_weighted_means() -> None:
    uploads = [Upload(i, w, {"a": torch.tensor([v])}) for i, (w, v) in enumerate([(1.0, 4.0), (3.0, 8.0)])]
    assert dense(mean(uploads, lambda upload: upload.update["a"])) == 7
    state = Method().aggregate(ServerState({"a": torch.tensor([1.0])}), uploads, worlds.task())
    assert dense(state.shared["a"]) == -6
    assert replace(state, round=0).round == 0
