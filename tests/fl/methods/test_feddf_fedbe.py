"""FedDF and FedBE against their rounds written out, and where they come to FedAvg."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.public_rounds import around, averaged, fedbe, feddf, state, trained
from support import unequal, worlds
from support.compare import assert_near, assert_same
from support.unequal import read_back
from torch import nn

from fl.data.sources.embedded import Faces
from fl.method import Method, methods
from fl.methods.bases.public_data import PublicDataServer
from fl.methods.fedavg import FedAvg
from fl.methods.fedbe import FedBE
from fl.methods.feddf import FedDF
from fl.methods.fedlaw import FedLAW
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
from fl.seeds import stream
from fl.tensors import dense
from fl.types import Task

LOCAL = {**unequal.LOCAL, "weight_decay": 0.01}
NORM = worlds.task(batch_norm=True)
IMAGES = Faces(size=8).load().train.inputs[-6:].double()
fed = partial(unequal.federation, sizes=(2, 4, 6))


def small(**settings: Any) -> FedDF:
    server = {"public": Faces(size=8), "images": 6, "server_steps": 5, "server_lr": 0.02, "server_batch": 4}
    return FedDF(**{**LOCAL, **server, **settings})


def ensemble(**settings: Any) -> FedBE:
    server = {"public": Faces(size=8), "images": 6, "server_epochs": 3, "server_lr": 0.1, "server_batch": 4}
    drawn = {"drawn_models": 2, "average_from": 2, "average_every": 2, "spread": 3.0}
    return FedBE(**{**LOCAL, **server, **drawn, **settings})


# Adam divides by itself what is nothing but rounding: a bias before batch norm
WORLDS = pytest.mark.parametrize(("task", "tolerance"), [(None, 1e-10), (NORM, 1e-8)], ids=["plain", "batch-norm"])


@WORLDS
@pytest.mark.parametrize("max_norm", [None, 1e-3])
def test_feddf_equals_its_rounds_written_out(task: Task | None, tolerance: float, max_norm: float | None) -> None:
    method = small(server_max_norm=max_norm)
    run = fed(method, task=task)
    for clients in ([0, 1, 2], [0, 2]):
        sent, before = state(run), run.server
        models = trained(run, sent, run.run_round(clients), method)
        order = method.batches(before, method.server_phase(), 6)
        assert [len(index) for index in order] == [4, 2, 4, 2, 4]
        expected = feddf(models, run.client.base.model, IMAGES, order, 0.02, max_norm)
        assert_near(state(run), expected, tolerance)


def flat_norm() -> Task:
    """Batch norm over one number an image."""
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.BatchNorm1d(5), nn.ReLU())
    model = nn.Sequential(OrderedDict(body=body, head=nn.Linear(5, 3)))
    return Task(model=model, input_shape=(1, 8, 8), num_classes=3, head="head.").to(dtype=torch.float64)


@pytest.mark.parametrize("kind", [FedDF, FedBE, FedLAW])
@pytest.mark.parametrize(
    ("settings", "got"), [({"server_batch": 1}, "server_batch 1: body.2 of"), ({"images": 1}, "1 image in all: body.2")]
)
def test_steps_that_batch_norm_cannot_take_are_refused_before_training(
    kind: type[PublicDataServer], settings: dict[str, Any], got: str
) -> None:
    method = replace(kind.example(), **settings)
    with pytest.raises(ValueError, match=f"expected 2 images or more in each step of the server, got {got}.*to 2 or"):
        fed(method, task=flat_norm())


@pytest.mark.parametrize("kind", [FedDF, FedBE, FedLAW])
def test_steps_of_one_image_are_taken_where_there_is_something_to_normalize_over(kind: type[PublicDataServer]) -> None:
    for method in (replace(kind.example(), server_batch=1), replace(kind.example(), images=1)):
        for task in (None, NORM):
            finite_after_a_round(method, task)


def finite_after_a_round(method: Method, task: Task | None) -> None:
    run = fed(method, task=task)
    run.run_round([1, 2])
    assert all(bool(dense(value).isfinite().all()) for value in run.server.shared.values())


def test_batch_norm_at_rest_takes_single_images_but_where_statistics_are_taken_anew() -> None:
    for kind in (FedDF, FedLAW):
        finite_after_a_round(replace(kind.example(), server_batch=1, train_mode=False), task=flat_norm())
    averaging = replace(FedBE.example(), server_batch=1, train_mode=False)
    with pytest.raises(ValueError, match="expected 2 images or more in each step of the server"):
        fed(averaging, task=flat_norm())


@pytest.mark.parametrize("kind", [FedBE, FedLAW])
def test_a_server_that_takes_no_step_is_not_asked_for_more_images(kind: type[PublicDataServer]) -> None:
    run = fed(replace(kind.example(), server_batch=1, server_epochs=0), task=flat_norm())
    run.run_round([1, 2])
    assert run.server.round == 1


@pytest.mark.parametrize("kind", [FedDF, FedBE, FedLAW])
def test_one_image_left_over_joins_the_batch_before(kind: type[PublicDataServer]) -> None:
    """Batch norm over one number an image trains on no single one."""
    run = fed(replace(kind.example(), images=5, server_batch=2), task=flat_norm())
    run.run_round()
    assert all(bool(dense(value).isfinite().all()) for value in {**run.server.shared, **run.server.buffers}.values())


@pytest.mark.parametrize(
    ("count", "size", "expected"),
    [(9, 4, [4, 5]), (10, 4, [4, 4, 2]), (8, 4, [4, 4]), (3, 1, [1, 1, 1]), (1, 4, [1]), (3, 4, [3])],
)
def test_sizes_of_the_servers_batches(count: int, size: int, expected: list[int]) -> None:
    steps, passes = small(server_steps=7, server_batch=size), ensemble(server_epochs=2, server_batch=size)
    for method, found in ((steps, (expected * 7)[:7]), (passes, expected * 2)):
        run = fed(method)
        order = method.batches(run.server, method.server_phase(), count)
        assert [len(index) for index in order] == found
        once = torch.cat(order[: len(expected)])
        assert sorted(once.tolist()) == list(range(count))


def test_feddf_without_a_step_size_is_fedavg() -> None:
    ours, theirs = fed(small(server_lr=0.0)), fed(FedAvg(**LOCAL))
    for clients in ([0, 1, 2], [1, 2]):
        for run in (ours, theirs):
            run.run_round(clients)
    assert_same(ours.server.shared, theirs.server.shared)
    moved = fed(small())
    moved.run_round([0, 1, 2])
    theirs = fed(FedAvg(**LOCAL))
    theirs.run_round([0, 1, 2])
    assert not torch.equal(moved.server.shared["head.weight"], theirs.server.shared["head.weight"])  # type: ignore[arg-type]


def test_the_server_learns_to_say_what_its_teachers_say() -> None:
    method = small(server_steps=60, images=None, server_batch=32)
    run = fed(method)
    sent = state(run)
    models = trained(run, sent, run.run_round(), method)
    every = Faces(size=8).load().train.inputs.double()
    with torch.no_grad():
        said = sum(model.eval()(every) for model, _ in models) / len(models)
        off = []
        for values in (averaged(models), state(run)):
            student = run.client.base.model
            student.load_state_dict(values)
            off.append(float((said.softmax(-1) - student.eval()(every).softmax(-1)).abs().mean()))
    assert off[1] < 0.5 * off[0]


@pytest.mark.parametrize("task", [None, NORM], ids=["plain", "batch-norm"])
@pytest.mark.parametrize("settings", [{}, {"distribution": "dirichlet", "temperature": 1.5}, {"average_from": 99}])
def test_fedbe_equals_its_rounds_written_out(task: Task | None, settings: dict[str, Any]) -> None:
    method = ensemble(**settings)
    run = fed(method, task=task)
    averages = range(4, 7, 2) if "average_from" not in settings else range(0)
    for clients in ([0, 1, 2], [0, 2]):
        sent, before = state(run), run.server
        rounds = run.run_round(clients)
        models = trained(run, sent, rounds, method)
        mean = averaged(models)
        drawn = [
            {**mean, **{name: dense(value) for name, value in params.items()}}
            for params in method.sample_teachers(before, [done.upload for done in rounds])
        ]
        order = method.batches(before, method.server_phase(), 6)
        template = run.client.base.model
        expected = fedbe(models, drawn, template, IMAGES, order, 0.1, method.temperature, averages, 4)
        assert_near(state(run), expected, 1e-10)


def test_fedbe_draws_from_the_gaussian_of_its_code() -> None:
    method = ensemble()
    run = fed(method)
    sent, before = state(run), run.server
    rounds = run.run_round()
    models = trained(run, sent, rounds, method)
    drawn = method.sample_teachers(before, [done.upload for done in rounds])
    noise = stream(int(dense(before.own["keys"]["seed"])), "public", 0, "models")
    for params in drawn:
        expected = {
            name: around(sent, models, name, 3.0, torch.randn(value.shape, generator=noise, dtype=torch.float64))
            for name, value in run.client.task.parameters.items()
        }
        assert_near(params, expected, 1e-10)
    assert len(drawn) == 2


def test_fedbe_draws_means_of_clients() -> None:
    method = ensemble(distribution="dirichlet", drawn_models=40)
    run = fed(method)
    sent, before = state(run), run.server
    rounds = run.run_round()
    models = trained(run, sent, rounds, method)
    ends = torch.stack([dict(model.named_parameters())["head.weight"].detach().flatten() for model, _ in models], 1)
    shares = []
    for params in method.sample_teachers(before, [done.upload for done in rounds]):
        found = torch.linalg.lstsq(ends, dense(params["head.weight"]).flatten()[:, None]).solution.flatten()
        torch.testing.assert_close(ends @ found, dense(params["head.weight"]).flatten(), rtol=1e-9, atol=1e-12)
        shares.append(found)
    every = torch.stack(shares)
    torch.testing.assert_close(every.sum(1), torch.ones(40, dtype=torch.float64), rtol=1e-9, atol=0)
    assert float(every.min()) > -1e-9
    assert float((every.mean(0) - 1 / 3).abs().max()) < 0.15
    assert float(every.std(0).min()) > 0.1


def test_fedbe_without_a_step_size_is_fedavg() -> None:
    ours, theirs = fed(ensemble(server_lr=0.0)), fed(FedAvg(**LOCAL))
    for clients in ([0, 1, 2], [1, 2]):
        for run in (ours, theirs):
            run.run_round(clients)
    assert_near(ours.server.shared, theirs.server.shared, 1e-14)


@pytest.mark.parametrize("method", [small(), ensemble()], ids=["feddf", "fedbe"])
def test_a_federation_read_back_goes_on_as_the_whole_one(tmp_path: Path, method: Method) -> None:
    whole, again = read_back(lambda: fed(method, task=NORM), tmp_path, [0, 1], ([1, 2],))
    assert_same(state(again), state(whole))  # type: ignore[arg-type]


def test_what_travels_is_fedavgs() -> None:
    count = sum(value.numel() for value in worlds.task().parameters.values())
    for method in (small(), ensemble()):
        record = fed(method).step(evaluate=False)
        assert record.numbers_up == record.numbers_down == count


def test_each_round_has_random_numbers_of_its_own() -> None:
    method = ensemble()
    run = fed(method)
    seen = []
    for _ in range(2):
        seen.append(torch.cat(method.batches(run.server, method.server_phase(), 50)))
        run.run_round([])
    assert not torch.equal(*seen)


def test_images_are_the_last_of_their_part() -> None:
    task, data = worlds.task(), Faces(size=8).load()
    assert torch.equal(small(images=3).public_images(task).inputs, data.train.inputs[-3:].double())
    assert torch.equal(small(images=None, part="test").public_images(task).labels, data.test.labels)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"public": Faces(size=9)}, r"expected images of shape \[1, 8, 8\], as the clients', got \[1, 9, 9\]"),
        ({"images": 161}, "expected 161 images or more in faces, train, got 160"),
    ],
)
def test_images_that_do_not_fit_are_refused_at_once(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fed(small(**settings))


def test_images_have_to_be_named() -> None:
    with pytest.raises(ValueError, match="method 'feddf': expected a value for public, got none"):
        methods.build("feddf")
    found = methods.build({"name": "feddf", "public": {"name": "faces", "size": 8}})
    assert found == FedDF(public=Faces(size=8))


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (small, {"images": 0}, "images: expected a (whole )?number >= 1( or null)?, got 0"),
        (small, {"parametrization": Hypernetwork.example()}, "'direct'"),
        (small, {"server_steps": 0}, "expected steps >= 1"),
        (small, {"server_lr": -1.0}, "server_lr: expected a number >= 0, got"),
        (small, {"server_max_norm": 0.0}, "server_max_norm: expected a number > 0 or null"),
        (ensemble, {"drawn_models": -1}, "drawn_models: expected a (whole )?number >= 0( or null)?, got -1"),
        (ensemble, {"average_every": 0}, "average_every: expected a (whole )?number >= 1( or null)?, got 0"),
        (ensemble, {"temperature": 0.0}, "temperature: expected a (whole )?number > 0( or null)?, got 0"),
        (ensemble, {"concentration": 0.0}, "concentration: expected a (whole )?number > 0( or null)?, got 0"),
    ],
)
def test_settings_out_of_range(make: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**settings)
