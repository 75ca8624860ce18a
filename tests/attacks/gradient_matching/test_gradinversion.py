"""GradInversion: the statistics a view gives away, the agreement of several searches, and the noise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import chains, worlds
from torch import nn

import attacks
from attacks.base import Reconstruction
from attacks.gradient_matching.engine.batching import ProblemBatch
from attacks.gradient_matching.engine.problem import INPUTS, LABELS
from attacks.gradient_matching.gradinversion import (
    BatchNormStatistics,
    GradInversion,
    ImageEnergy,
    candidate_moments,
    client_shares,
    consensus,
    known_moments,
)
from defenses.secagg import SecAgg
from fl.capture import from_batch
from fl.client import Client
from fl.defense import Defense
from fl.federation import ClientData, Federation
from fl.method import Download, Method
from fl.methods.fedavg import FedAvg
from fl.methods.fedper import FedPer
from fl.seeds import stream
from fl.simulation.client_round import ClientState, observe, prepare
from fl.types import Batch, Truth
from fl.view import ServerView, ThreatModel

NORM = "body.norm1"


def seen(
    count: int,
    *,
    steps: int = 1,
    threat: ThreatModel | None = None,
    batch_norm: bool = True,
    train_mode: bool = True,
    momentum: float | None = 0.1,
) -> tuple[ServerView, Truth]:
    """A client's steps on batches of two or more images; the server's running statistics are not at their start."""
    task = worlds.task(batch_norm=batch_norm)
    method = FedAvg(lr=1e-3, steps=steps, batch_size=count // steps, train_mode=train_mode)
    buffers = dict(task.buffers)
    if batch_norm:
        buffers[f"{NORM}.running_mean"] = torch.arange(4, dtype=torch.float64) / 10
        buffers[f"{NORM}.num_batches_tracked"] = torch.tensor(3)
        task.model.get_submodule(NORM).momentum = momentum  # type: ignore[assignment]
    download = Download(dict(task.parameters), buffers)
    return observe(prepare(Client(task, method), ClientState(), download, worlds.images(count, "gi")), threat=threat)[
        :2
    ]


def attack(**settings: object) -> GradInversion:
    built = attacks.build({"name": "gradinversion", "iterations": 20, **settings})
    assert isinstance(built, GradInversion)
    return built


def at_truth(view: ServerView, truth: Truth, images: torch.Tensor | None = None) -> dict[str, tuple]:
    guess = truth.candidate()
    guess = guess if images is None else replace(guess, inputs=images)
    return candidate_moments(view, guess, view.client, client_shares(view))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_buffers_after_one_step_give_the_statistics_of_the_very_batch(momentum: float | None) -> None:
    view, truth = seen(3, momentum=momentum)
    mine, true = known_moments(view)[NORM], at_truth(view, truth)[NORM]
    for x, y in zip(mine, true, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(mine[0], view.buffers[f"{NORM}.running_mean"])


def test_after_several_steps_they_are_the_weighted_mean_of_the_batches() -> None:
    view, truth = seen(6, steps=3)
    per_step = [at_truth(view, truth, truth.inputs[batch])[NORM][0] for step in truth.trace.order[0] for batch in step]
    weights = torch.tensor([0.9**2, 0.9, 1.0], dtype=torch.float64)
    expected = (weights[:, None] * torch.stack(per_step)).sum(0) / weights.sum()
    torch.testing.assert_close(
        known_moments(view)[NORM][0], expected, rtol=1e-2, atol=1e-3
    )  # the weights moved a little


@pytest.mark.parametrize("settings", [{"threat": ThreatModel(sees_buffers=False)}, {"train_mode": False}])
def test_without_the_batchs_own_the_running_statistics_stand_in(settings: dict) -> None:
    view, _ = seen(2, **settings)
    assert torch.equal(known_moments(view)[NORM][0], view.buffers[f"{NORM}.running_mean"])
    found = attack()(view)
    assert isinstance(found, Reconstruction)
    assert found.knowledge == ("batch-norm statistics (running)",)


def test_statistics_that_say_nothing_leave_no_term() -> None:
    plain, _ = seen(2, batch_norm=False)
    fresh, _ = seen(2, train_mode=False)
    fresh = replace(fresh, buffers={k: v * 0 if k.endswith("mean") else v for k, v in fresh.buffers.items()})
    for view in (plain, fresh):
        assert [type(term) for term in attack().regularizers(view)] == [ImageEnergy]
        found = attack()(view)
        assert isinstance(found, Reconstruction)
        assert found.knowledge == ()
    view, _ = seen(2)
    assert [type(term) for term in attack().regularizers(view)] == [ImageEnergy, BatchNormStatistics]
    found = attack()(view)
    assert isinstance(found, Reconstruction)
    assert found.knowledge == ("batch-norm statistics (batch)",)


def test_the_statistics_are_zero_at_the_truth_and_pull_guesses_towards_them() -> None:
    view, truth = seen(4)
    term = BatchNormStatistics(weight=1.0, first=1.0)
    target = term.constants(view)
    assert term(view, truth.candidate(), view.client, target) < 1e-9
    assert term(view, replace(truth.candidate(), inputs=1 - truth.inputs), view.client, target) > 1e-2
    assert not view.client.fixed_statistics_model.get_submodule(NORM)._forward_pre_hooks
    only = {
        "tv_weight": 0.0,
        "energy_weight": 0.0,
        "group_weight": 0.0,
        "langevin": 0.0,
        "iterations": 150,
        "restarts": 1,
        "first_layer_factor": 1.0,
    }
    errors = []
    for weight in (0.0, 10.0):
        found = attack(**only, statistics_weight=weight)(view, seed=0)
        assert isinstance(found, Reconstruction)
        assert found.inputs is not None
        errors.append(float(term(view, replace(truth.candidate(), inputs=found.inputs), view.client, target)))
    assert errors[1] < errors[0] / 2


def test_the_first_layer_alone_counts_as_often_as_it_is_told_to() -> None:
    layers = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2)
    model = chains.initialized(nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 3))).double()
    for norm in (model[1], model[4]):
        norm.running_mean += 0.5
    view, truth = from_batch(model, torch.rand(2, 1, 8, 8, generator=stream(0, "x")).double(), torch.tensor([0, 1]))
    target = BatchNormStatistics(weight=1.0, first=1.0).constants(view)
    assert len(target[0]) == 2
    never, once, fivefold = (
        float(BatchNormStatistics(weight=1.0, first=first)(view, truth.candidate(), view.client, target))
        for first in (0.0, 1.0, 5.0)
    )
    assert 0 < never < once
    assert fivefold - once == pytest.approx(4 * (once - never), rel=1e-9)
    layers = list(target[0].items())
    swapped = dict(reversed(layers)), target[1]
    other = float(BatchNormStatistics(weight=1.0, first=0.0)(view, truth.candidate(), view.client, swapped))
    assert other == pytest.approx(once - never, rel=1e-9)


def test_the_objectives_gradient_is_right_with_all_terms() -> None:
    views = [seen(2)[0], seen(2)[0]]
    settings = attack(restarts=2, group_weight=0.5, max_shift=1)
    problems = [settings.build_problem(view) for view in views]
    problems = [replace(p, labels=torch.tensor([0, 1])) for p in problems for _ in range(2)]
    problems = [problems[0], problems[0], problems[2], problems[2]]
    values = {INPUTS: torch.randn(4, 2, 1, 8, 8, generator=stream(0, "x"), dtype=torch.float64)}
    together, grads = settings.evaluate_batch(ProblemBatch(problems), values)
    for i in (0, 2):
        pair = {INPUTS: values[INPUTS][i : i + 2]}
        alone, mine = settings.evaluate_batch(ProblemBatch(problems[i : i + 2]), pair)
        torch.testing.assert_close(together[i : i + 2], alone, rtol=1e-10, atol=0)
        torch.testing.assert_close(grads[INPUTS][i : i + 2], mine[INPUTS], rtol=1e-8, atol=1e-12)
    settings = replace(settings, max_shift=0)
    along = torch.randn(2, 2, 1, 8, 8, generator=stream(1, "x"), dtype=torch.float64)
    pair = values[INPUTS][:2]
    _, mine = settings.evaluate_batch(ProblemBatch(problems[:2]), {INPUTS: pair})
    ends = [
        settings.evaluate_batch(ProblemBatch(problems[:2]), {INPUTS: pair + s * along})[0].sum() for s in (1e-6, -1e-6)
    ]
    assert float(ends[0] - ends[1]) / 2e-6 == pytest.approx(float((mine[INPUTS] * along).sum()), rel=1e-5)


def test_a_batch_with_unknown_labels_is_not_held_together() -> None:
    view, _ = seen(2)
    settings = attack(restarts=2, group_weight=100.0)
    values = torch.randn(2, 2, 1, 8, 8, generator=stream(0, "x"), dtype=torch.float64)
    for labels in (None, torch.tensor([0, 1])):
        problem = replace(settings.build_problem(view), labels=labels)
        variables = {INPUTS: values}
        if labels is None:
            variables[LABELS] = torch.zeros(2, 2, 3, dtype=torch.float64)
        with_group, _ = settings.evaluate_batch(ProblemBatch([problem] * 2), dict(variables))
        without, _ = ProblemBatch([problem] * 2).evaluate(dict(variables))
        assert torch.equal(with_group, without) == (labels is None)


def test_the_group_draws_searches_together() -> None:
    view, _ = seen(2, threat=ThreatModel(knows_labels=True))
    still = {"iterations": 60, "restarts": 3, "langevin": 0.0}
    spread = {}
    for weight in (0.0, 100.0):
        ended: list[torch.Tensor] = []

        class Watched(GradInversion):
            def build_result(self, problem, row, *rest):  # type: ignore[no-untyped-def]
                ended.append(row[INPUTS])  # noqa: B023
                return super().build_result(problem, row, *rest)

        Watched(**still, group_weight=weight)(view, seed=0)  # type: ignore[arg-type]
        assert len(ended) == 3
        spread[weight] = float(torch.stack(ended).std(0).mean())
    assert spread[100.0] < spread[0.0] / 2


def test_searches_of_one_view_are_never_parted() -> None:
    views = [seen(2, threat=ThreatModel(knows_labels=True))[0] for _ in range(3)]
    settings = attack(restarts=2, group_weight=1.0)
    assert replace(settings, max_parallel_trials=5).batch_capacity() == 4
    together = settings.run(views, [1, 2, 3])
    parted = replace(settings, max_parallel_trials=1).run(views, [1, 2, 3])
    for x, y in zip(together, parted, strict=True):
        assert isinstance(x, Reconstruction)
        assert isinstance(y, Reconstruction)
        assert (x.inputs - y.inputs).abs().max() < 1e-7  # type: ignore[operator]


def test_the_consensus_of_shifted_images_is_the_image() -> None:
    image = torch.rand(2, 3, 9, 8, generator=stream(0, "image"), dtype=torch.float64)
    moves = [(0, 0), (0, 0), (1, 0), (-1, 2), (0, -2)]
    guesses = torch.stack([image.roll(move, (-2, -1)) for move in moves])
    torch.testing.assert_close(consensus(guesses, 2), image)
    assert (consensus(guesses, 0) - image).abs().max() > 0.1
    torch.testing.assert_close(consensus(guesses, 0), guesses.mean(0))
    near = consensus(guesses, 1)  # two of them can't come all the way
    assert (near - image).abs().max() > 0.1


def test_noise_comes_from_the_seed_alone() -> None:
    view, _ = seen(2)
    state = torch.get_rng_state()
    first, again = (attack(langevin=0.2)(view, seed=4) for _ in range(2))
    other = attack(langevin=0.0)(view, seed=4)
    assert torch.equal(state, torch.get_rng_state())
    assert isinstance(first, Reconstruction)
    assert isinstance(again, Reconstruction)
    assert isinstance(other, Reconstruction)
    assert torch.equal(first.inputs, again.inputs)  # type: ignore[arg-type]
    assert not torch.equal(first.inputs, other.inputs)  # type: ignore[arg-type]


def test_known_labels_and_batches_work() -> None:
    view, truth = seen(4, threat=ThreatModel(knows_labels=True))
    found = attack()(view)
    assert isinstance(found, Reconstruction)
    assert found.labels is not None
    assert torch.equal(found.labels, truth.labels)
    assert found.knowledge == ("labels", "batch-norm statistics (batch)")


def test_bad_settings_are_refused() -> None:
    for setting in ("energy_weight", "statistics_weight", "first_layer_factor", "group_weight", "max_shift"):
        with pytest.raises(ValueError, match=rf"{setting}: expected a (whole )?number >= 0"):
            attack(**{setting: -1})
    with pytest.raises(ValueError, match="expected success_threshold=0"):
        attack(success_threshold=0.1)


def test_the_energy_is_that_of_normalized_images() -> None:
    view, truth = seen(2)
    view = replace(view, task=replace(view.task, mean=(0.5,), std=(0.25,)))
    term = ImageEnergy(weight=2.0)
    value = term(view, truth.candidate(), view.client, term.constants(view))
    assert float(value) == pytest.approx(2 * float(((truth.inputs - 0.5) / 0.25).square().mean()))


def test_a_batch_of_one_may_be_attacked() -> None:
    images = Batch(*(x[:1] for x in (worlds.images(1, "one").inputs, worlds.images(1, "one").labels)))
    task = worlds.task(batch_norm=True)
    download = Download(dict(task.parameters), dict(task.buffers))
    view, _, _ = observe(prepare(Client(task, FedAvg(lr=0.1, steps=1)), ClientState(), download, images))
    found = attack()(view)
    assert isinstance(found, Reconstruction)
    assert found.inputs is not None
    assert found.inputs.shape == (1, 1, 8, 8)


@pytest.mark.parametrize("method", [FedAvg(lr=0.1, steps=1), FedPer(lr=0.1, steps=1)], ids=lambda m: m.name)
def test_a_groups_statistics_are_the_mean_of_its_clients(method: Method) -> None:
    data = [worlds.images(n, "group", n) for n in (2, 5)]
    client = Client(worlds.task(batch_norm=True), method, SecAgg(group_size=2))
    view, truth = Federation(client, [ClientData(d, d) for d in data]).observe(0)
    term = BatchNormStatistics(weight=1.0, first=1.0)
    target = term.constants(view)
    assert term(view, truth.candidate(), view.client, target) < 1e-9
    assert term(view, replace(truth.candidate(), inputs=truth.inputs.flip(0)), view.client, target) > 1e-5
    found = attack(iterations=2)(view)
    assert isinstance(found, Reconstruction)
    assert found.knowledge == ("batch-norm statistics (batch)",)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_clients_of_a_group_move_running_statistics_by_their_own_numbers_of_batches(momentum: float | None) -> None:
    """One batch of two images, and three batches of them."""
    data = [ClientData(part, part) for part in (worlds.images(n, "group", n) for n in (2, 6))]
    task, method = worlds.task(batch_norm=True), FedAvg(lr=0.1, epochs=1, batch_size=2)
    task.model.get_submodule(NORM).momentum = momentum  # type: ignore[assignment]
    group, alone = (Federation(Client(task, method, defense), data) for defense in (SecAgg(group_size=2), Defense()))
    for run in (group, alone):
        old = {f"{NORM}.running_mean": torch.full((4,), 2.0).double(), f"{NORM}.num_batches_tracked": torch.tensor(3)}
        run.server = replace(run.server, buffers={**run.server.buffers, **old})
    view, _ = group.observe(0)
    kept = [0.9, 0.9**3] if momentum else [3 / 4, 3 / 6]
    new = [part.weight * (1 - old) for part, old in zip(view.parts, kept, strict=True)]
    assert client_shares(view)[NORM].tolist() == pytest.approx([x / sum(new) for x in new])
    means = [known_moments(alone.observe(i)[0])[NORM][0] for i in range(2)]
    expected = sum(x / sum(new) * mean for x, mean in zip(new, means, strict=True))
    torch.testing.assert_close(known_moments(view)[NORM][0], expected, rtol=1e-9, atol=1e-12)


def test_a_group_of_unknown_schedule_has_running_statistics_alone() -> None:
    view, _ = worlds.federation(FedAvg(lr=0.1, steps=2), SecAgg(group_size=2), worlds.task(batch_norm=True)).observe(0)
    assert not torch.equal(known_moments(view)[NORM][0], view.buffers[f"{NORM}.running_mean"])
    unknown = replace(view, schedule=None, parts=tuple(replace(part, schedule=None) for part in view.parts))
    assert torch.equal(known_moments(unknown)[NORM][0], view.buffers[f"{NORM}.running_mean"])
