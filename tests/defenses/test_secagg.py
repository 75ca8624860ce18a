from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from support import worlds
from support.compare import assert_near, assert_same, tensors

from attacks.base import NotApplicable, Reconstruction, build
from defenses import defenses
from defenses.compose import Chain
from defenses.noise import Noise
from defenses.secagg import SecAgg
from eval.metrics.update_prediction_error import prediction_error
from fl.aggregated_view import AggregationGroups, as_single_client
from fl.client import Client
from fl.defense import Defense
from fl.federation import ClientData, Federation
from fl.method import Download, Method, ServerState
from fl.methods.fedavg import FedAvg
from fl.methods.fedper import FedPer
from fl.methods.hyperfl import HyperFL
from fl.methods.pfedhn import PFedHN
from fl.models import build as build_model
from fl.predict import predict
from fl.simulation.protocol import Protocol
from fl.tensors import dense
from fl.types import Task
from fl.view import ServerView, ThreatModel

TRAINED = FedAvg(lr=0.1, momentum=0.5, weight_decay=1e-2, epochs=2, batch_size=2)


def uneven(method: Method, defense: Defense) -> Federation:
    """Three clients of 3, 5 and 4 images."""
    data = [ClientData(worlds.images(n, "train", n), worlds.images(2, "test", n)) for n in (3, 5, 4)]
    return Federation(Client(worlds.task(), method, defense), data)


def test_the_server_sees_the_weighted_mean_of_the_group() -> None:
    """Of clients 0, 1 and 2, each as observed on its own, by their numbers of images."""
    alone = uneven(TRAINED, Defense())
    view, _ = uneven(TRAINED, SecAgg(group_size=3)).observe(2)
    single = {i: alone.observe(i)[0].update for i in range(3)}
    for name, value in view.update.items():
        naive = sum(n / 12 * dense(single[i][name]) for i, n in enumerate((3, 5, 4)))
        torch.testing.assert_close(dense(value), naive, rtol=1e-13, atol=1e-15)
    assert [part.weight for part in view.parts] == [3 / 12, 5 / 12, 4 / 12]
    assert view.batch_size == 12


@pytest.mark.parametrize("method", [TRAINED, HyperFL.example(), FedPer.example()], ids=lambda m: m.name)
def test_the_truth_predicts_the_mean_of_uneven_clients(method: Method) -> None:
    """They take 4, 6 and 4 steps, of batches of one and two."""
    view, truth = uneven(method, SecAgg(group_size=3)).observe(0)
    assert_same(predict(view, truth.candidate()), view.update)
    wrong = replace(truth.candidate(), inputs=truth.inputs.flip(0))
    assert any(not torch.equal(dense(v), dense(view.update[n])) for n, v in predict(view, wrong).items())


def test_images_in_turn_stay_with_their_clients() -> None:
    """Full batches: any order within a client gives its update, so in turn is right."""
    method = FedAvg(lr=0.1, momentum=0.5, steps=3)
    view, truth = uneven(method, SecAgg(group_size=3)).observe(0)
    candidate = replace(truth.candidate(), order=None)
    assert_near(predict(view, candidate), view.update, 1e-12)


def test_no_single_update_is_in_the_view() -> None:
    run = uneven(TRAINED, SecAgg(group_size=2))
    view, _ = run.observe(0)
    hidden = [value for i in (0, 1) for value in uneven(TRAINED, Defense()).observe(i)[0].update.values()]
    held = list(tensors([view]))
    assert held
    assert not any(x.shape == dense(y).shape and torch.equal(x, dense(y)) for x in held for y in hidden)


def test_one_step_each_is_a_step_on_all_images() -> None:
    run = uneven(FedAvg(lr=0.1, steps=1), SecAgg(group_size=3))
    view, truth = run.observe(0)
    one = as_single_client(view)
    assert isinstance(one, ServerView)
    assert one.schedule == (((12,),),)
    again, _ = run.observe(0, threat=ThreatModel(history_rounds=1), history=(view,))
    whole = as_single_client(again)
    assert isinstance(whole, ServerView)
    assert [past.parts for past in whole.history] == [()]
    assert_near(predict(one, truth.candidate()), view.update, 1e-12)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (replace(TRAINED, epochs=1), "several steps"),
        (FedPer(lr=0.1, steps=1), "private tensors"),
        (FedAvg(lr=0.1, steps=1, max_norm=1.0), "not linear"),
        (FedAvg(lr=0.1, steps=1, batch_size=3), "weights"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_no_step_on_all_images_is_refused_to_attacks_on_one_client(method: Method, reason: str) -> None:
    view, _ = uneven(method, SecAgg(group_size=3)).observe(0)
    result = build("cascade")(view)
    assert isinstance(result, NotApplicable)
    assert "only the mean of 3 clients" in result.reason
    assert reason in result.reason


def test_a_defended_member_is_no_part_of_a_plain_step() -> None:
    chain = defenses.build({"name": "chain", "parts": [{"name": "prune", "ratio": 0.5}, {"name": "secagg"}]})
    run = worlds.federation(FedAvg(lr=0.1, steps=1), replace(chain, parts=(chain.parts[0], SecAgg(group_size=2))))  # type: ignore[attr-defined,call-arg]
    view, truth = run.observe(0)
    assert_same(predict(view, truth.candidate()), view.update)
    assert isinstance(as_single_client(view), str)


def test_a_search_finds_the_images_of_all_clients() -> None:
    """Two clients, one image and one step each, on a smooth network: both images come back."""
    task = build_model("lenet-zhu", num_classes=3, seed=0, input_shape=(1, 8, 8)).to(dtype=torch.float64)
    data = [ClientData(worlds.images(1, "victim", i), worlds.images(2, "test", i)) for i in range(2)]
    run = Federation(Client(task, FedAvg(lr=0.1, steps=1), SecAgg(group_size=2)), data)
    view, truth = run.observe(0, threat=ThreatModel(knows_labels=True))
    result = build({"name": "dlg", "iterations": 300, "restarts": 4})(view)
    assert isinstance(result, Reconstruction)
    assert result.inputs is not None
    errors = (result.inputs[:, None] - truth.inputs[None]).square().mean((2, 3, 4)).min(0).values
    assert errors.max() < 1e-4


@pytest.mark.parametrize("name", ["pfedhn", "hypergenfl", "hfedf", "fedgma"])
def test_servers_that_need_every_update_are_refused(name: str) -> None:
    from fl.method import methods

    method = dict(methods.examples())[name]
    with pytest.raises(ValueError, match=r"secagg: expected a server that needs the mean.*`aggregates_mean_only`"):
        Client(worlds.task(), method, SecAgg())
    assert not PFedHN.example().aggregates_mean_only


def test_groups_never_overlap_and_none_is_smaller_than_asked_for() -> None:
    groups = [AggregationGroups(size=3, participants=8, asked=8).of(i) for i in range(8)]
    assert groups == [range(3)] * 3 + [range(3, 8)] * 5
    assert [AggregationGroups(size=1, participants=8, asked=1).of(i) for i in (2, 9)] == [range(2, 3), range(9, 10)]


def test_a_group_needs_a_round_of_as_many_who_take_part() -> None:
    run = uneven(TRAINED, SecAgg(group_size=3))
    run.client_fraction = 0.67
    with pytest.raises(ValueError, match="groups of at most the 2 clients of a round, got 3"):
        run.observe(0)
    run = uneven(TRAINED, SecAgg(group_size=2))
    run.client_fraction = 0.67
    with pytest.raises(ValueError, match="at most the 2 clients of a round, got clients 0 to 2"):
        run.observe(0)
    run = Federation(run.client, run.data, protocol=Protocol(held_out_clients=1))
    with pytest.raises(ValueError, match="one of the 2 clients that take part, got client 2"):
        run.observe(2)
    assert len(run.observe(1)[0].parts) == 2


@pytest.mark.parametrize("withheld", ["knows_batch_size", "knows_schedule"])
def test_nothing_is_predicted_where_no_one_knows_whose_images_are_whose(withheld: str) -> None:
    view, truth = uneven(TRAINED, SecAgg(group_size=3)).observe(0, threat=ThreatModel(**{withheld: False}))  # type: ignore[arg-type]
    assert view.schedule is None
    with pytest.raises(ValueError, match="a group whose clients' schedules are known"):
        predict(view, truth.candidate())
    assert prediction_error(view, truth) is None


def test_weights_tell_no_numbers_of_images_that_are_withheld() -> None:
    view, _ = uneven(TRAINED, SecAgg(group_size=3)).observe(0, threat=ThreatModel(knows_batch_size=False))
    assert all(math.isnan(part.weight) for part in view.parts)


def test_counters_of_batches_are_not_averaged() -> None:
    data = [ClientData(worlds.images(n, "train", n), worlds.images(2, "test", n)) for n in (2, 6)]
    run = Federation(Client(worlds.task(batch_norm=True), TRAINED, SecAgg(group_size=2)), data)
    after = run.observe(0)[0].buffers_after
    assert after
    assert all(after[name].dtype == run.client.task.buffers[name].dtype for name in after)
    assert not any("num_batches_tracked" in name for name in after)


@dataclass(frozen=True, kw_only=True)
class Greeting(FedAvg):
    """Sends each client a payload: the same numbers, or its own."""

    own: bool

    def broadcast(self, server: ServerState, client: int, task: Task) -> Download:
        """Weights in tensors of the client's own, and the payload."""
        sent = super().broadcast(server, client, task)
        copies = {name: dense(value).clone() for name, value in sent.shared.items()}
        return replace(sent, shared=copies, received={"hello": {"number": torch.tensor(client * float(self.own))}})


def test_clients_of_a_group_must_receive_the_same_numbers() -> None:
    view, _ = uneven(Greeting(lr=0.1, steps=1, own=False), SecAgg(group_size=3)).observe(0)
    assert len(view.parts) == 3
    with pytest.raises(ValueError, match="expected all clients of a group to receive the same, got received"):
        uneven(Greeting(lr=0.1, steps=1, own=True), SecAgg(group_size=3)).observe(0)


def test_earlier_views_are_of_the_group_as_well() -> None:
    alone, _ = uneven(TRAINED, Defense()).observe(0)
    with pytest.raises(ValueError, match=r"earlier views of the clients \[0, 1, 2\] together"):
        uneven(TRAINED, SecAgg(group_size=3)).observe(0, threat=ThreatModel(history_rounds=1), history=(alone,))


@pytest.mark.parametrize(
    "parts", [(SecAgg(group_size=2), Noise()), (SecAgg(group_size=2), SecAgg(group_size=2))], ids=str
)
def test_it_is_the_last_of_a_chain(parts: tuple[Defense, ...]) -> None:
    assert Chain(parts=(Noise(), SecAgg(group_size=2))).group_size == 2
    with pytest.raises(ValueError, match="expected secagg once, as the last of a chain"):
        Chain(parts=parts)


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match=r"group_size: expected a (whole )?number >= 2"):
        SecAgg(group_size=1)
    with pytest.raises(ValueError, match="expected groups of at most the 3 clients of a round, got 4"):
        uneven(TRAINED, SecAgg(group_size=4)).observe(0)
    with pytest.raises(ValueError, match="expected images for each"):
        uneven(TRAINED, SecAgg(group_size=2)).observe(0, data=worlds.images(1))
