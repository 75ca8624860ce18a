"""The search: stacks equal single trials, success where it must be, and choices made without the truth."""

import copy
import re
from dataclasses import replace

import pytest
import torch
from support import worlds

import attacks
from attacks.base import NotApplicable, Reconstruction
from attacks.gradient_matching.engine.base import CONFIDENT_LOGIT, GradientMatching
from attacks.gradient_matching.engine.batching import ProblemBatch
from attacks.gradient_matching.engine.best_iterates import BestIterates
from attacks.gradient_matching.engine.optimizers import Adam
from attacks.gradient_matching.engine.problem import INPUTS, LABELS, MatchingProblem, Variables
from defenses.clip import Clip
from defenses.compose import Chain
from defenses.secagg import SecAgg
from eval.metrics.image import psnr
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.method import Download
from fl.methods.fedavg import FedAvg
from fl.methods.fedbn import FedBN
from fl.methods.hyperfl import HyperFL
from fl.models import build as build_model
from fl.seeds import stream
from fl.simulation.client_round import ClientState, observe, prepare
from fl.types import Batch, Task, Truth
from fl.view import ServerView, ThreatModel


def shared_by(task: Task, method: FedAvg, images: Batch, threat: ThreatModel | None = None) -> tuple[ServerView, Truth]:
    download = Download(dict(task.parameters), dict(task.buffers))
    return observe(prepare(Client(task, method), ClientState(), download, images), threat=threat)[:2]


def one_step(lr: float = 0.1, **settings: object) -> FedAvg:
    return FedAvg(lr=lr, steps=1, batch_size=None, **settings)  # type: ignore[arg-type]


def tiny_views(count: int) -> list[tuple[ServerView, Truth]]:
    task = worlds.task()
    return [shared_by(task, one_step(), worlds.images(1, "m", i)) for i in range(count)]


@pytest.mark.parametrize("name", ["ig", "dlg", "idlg"])
def test_a_stack_equals_one_trial_at_a_time(name: str) -> None:
    views = [view for view, _ in tiny_views(3)]
    attack = attacks.build({"name": name, "iterations": 12, "restarts": 2})
    together = attack.run(views, [1, 2, 3])
    alone = [attack(view, seed=seed) for view, seed in zip(views, [1, 2, 3], strict=True)]
    one_by_one = replace(attack, max_parallel_trials=1).run(views, [1, 2, 3])  # type: ignore[call-arg]
    for x, y, z in zip(together, alone, one_by_one, strict=True):
        assert isinstance(x, Reconstruction)
        assert isinstance(y, Reconstruction)
        assert isinstance(z, Reconstruction)
        assert (x.inputs - y.inputs).abs().max() < 1e-7  # type: ignore[operator]
        assert (x.inputs - z.inputs).abs().max() < 1e-7  # type: ignore[operator]
        assert x.objective == pytest.approx(y.objective, rel=1e-6)


def test_stacked_objectives_and_gradients_equal_single_ones() -> None:
    views = [view for view, _ in tiny_views(3)]
    settings = attacks.build("ig")
    assert isinstance(settings, GradientMatching)
    problems = [MatchingProblem(view, view.labels, "cosine", 1e-3) for view in views]
    problems = [replace(p, labels=torch.tensor([0])) for p in problems]
    rows = [settings.initial_variables(p, 0, i) for i, p in enumerate(problems)]
    together = ProblemBatch(problems).evaluate({k: torch.stack([row[k] for row in rows]) for k in rows[0]})
    for i, (problem, row) in enumerate(zip(problems, rows, strict=True)):
        value, grads = ProblemBatch([problem]).evaluate({k: v[None] for k, v in row.items()})
        assert torch.allclose(together[0][i], value[0], rtol=1e-12, atol=0)
        for k, g in grads.items():
            assert (together[1][k][i] - g[0]).norm() <= 1e-10 * g.norm()


def test_dlg_and_idlg_find_an_image_of_the_sigmoid_lenet() -> None:
    task = build_model("lenet-zhu", num_classes=3, input_shape=(1, 8, 8), seed=0).to(dtype=torch.float64)
    view, truth = shared_by(task, one_step(), worlds.images(1, "lenet"))
    for name in ("dlg", "idlg"):
        found = attacks.build({"name": name, "iterations": 400, "restarts": 4})(view, seed=0)
        assert isinstance(found, Reconstruction)
        assert found.inputs is not None
        assert psnr(found.inputs, truth.inputs).item() > 40
        assert found.labels is not None
        assert torch.equal(found.labels, truth.labels)


def test_ig_beats_a_constant_image_and_knows_the_label() -> None:
    task = build_model("lenet-zhu", num_classes=3, input_shape=(1, 8, 8), seed=0)
    images = worlds.images(1, "ig")
    view, truth = shared_by(task, one_step(), Batch(images.inputs.float(), images.labels))
    found = attacks.build({"name": "ig", "iterations": 600, "tv_weight": 0.0})(view, seed=0)
    assert isinstance(found, Reconstruction)
    assert found.inputs is not None
    assert found.labels is not None
    constant = truth.inputs.mean().expand_as(truth.inputs)
    assert psnr(found.inputs, truth.inputs) > psnr(constant, truth.inputs) + 3
    assert torch.equal(found.labels, truth.labels)
    assert 0 < found.objective < 1e-3
    assert found.history[0] == 1.0


def test_weight_decay_is_taken_out_of_both_sides() -> None:
    task, images = worlds.task(), worlds.images(1, "decay")
    with_decay, _ = shared_by(task, one_step(weight_decay=0.5), images)
    without, _ = shared_by(task, one_step(), images)
    a, b = MatchingProblem(with_decay, None, "cosine", 0.0), MatchingProblem(without, None, "cosine", 0.0)
    for name, value in a.observed.items():
        assert torch.allclose(value, b.observed[name], rtol=1e-9, atol=1e-12)  # type: ignore[arg-type]


def test_more_restarts_never_end_higher_and_stop_when_enough_is_found() -> None:
    view, _ = tiny_views(1)[0]
    one = attacks.build({"name": "ig", "iterations": 30})(view, seed=5)
    four = attacks.build({"name": "ig", "iterations": 30, "restarts": 4})(view, seed=5)
    first = attacks.build({"name": "ig", "iterations": 30, "restarts": 4, "success_threshold": 10.0})(view, seed=5)
    assert isinstance(one, Reconstruction)
    assert isinstance(four, Reconstruction)
    assert isinstance(first, Reconstruction)
    assert four.objective <= one.objective
    assert torch.equal(first.inputs, one.inputs)  # type: ignore[arg-type]


def test_restarts_are_compared_on_one_scale_and_stop_by_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial that falls far from far off is no match for one that began at the image."""
    view, truth = tiny_views(1)[0]
    images = (truth.inputs - torch.tensor(view.task.mean)) / torch.tensor(view.task.std)
    near, begun, start = 1, [], GradientMatching.initial_variables
    short = {"name": "ig", "iterations": 2, "schedule": "none"}  # the start itself may be kept

    def placed(self: GradientMatching, problem: MatchingProblem, seed: int, restart: int) -> Variables:
        begun.append(restart)
        made = start(self, problem, seed, restart)
        return {INPUTS: 0.99 * images} if restart == near else made

    monkeypatch.setattr(GradientMatching, "initial_variables", placed)
    for near in (0, 1):
        for stack in (1, 2):
            found = attacks.build({**short, "restarts": 2, "tv_weight": 0.0, "max_parallel_trials": stack})(view)
            assert isinstance(found, Reconstruction)
            assert found.inputs is not None
            assert psnr(found.inputs, truth.inputs) > 30
            assert found.objective == (1.0 if near == 0 else pytest.approx(found.history[0], rel=1e-12))
            assert found.history[0] == 1.0 if near == 0 else found.history[0] < 0.1
    near = 0
    begun.clear()
    attacks.build({**short, "restarts": 4, "success_threshold": 0.9999})(view)
    assert begun[1:] == [0, 1], "the first trial falls by nothing, the second one does"


def test_a_search_for_labels_begins_with_those_read_off() -> None:
    task, images = worlds.task(), worlds.images(6, "begin")
    view, truth = shared_by(task, one_step(), images)

    def begun(name: str, labels: str) -> list[torch.Tensor]:
        attack = attacks.build({"name": name, "labels": labels})
        assert isinstance(attack, GradientMatching)
        return [attack.initial_variables(attack.build_problem(view), 0, restart)[LABELS] for restart in range(3)]

    dealt = begun("ig", "joint")
    assert all(torch.equal(logits.argmax(1).sort().values, truth.labels.sort().values) for logits in dealt)
    assert all(sorted(row) == [0, 0, CONFIDENT_LOGIT] for logits in dealt for row in logits.tolist())
    assert len({tuple(logits.argmax(1).tolist()) for logits in dealt}) > 1
    for name, labels in (("ig", "random"), ("dlg", attacks.build("dlg").labels)):  # type: ignore[attr-defined]
        assert not any((logits == 0).any() for logits in begun(name, labels))
    headless = replace(view, update={n: v for n, v in view.update.items() if not n.startswith("head.")})
    view = headless
    assert not any((logits == 0).any() for logits in begun("ig", "joint"))


@pytest.mark.parametrize(("name", "size"), [("ig", 0.1), ("joint", 0.01)])
def test_label_logits_have_a_step_size_of_their_own(name: str, size: float) -> None:
    settings = attacks.build({"name": name, "schedule": "none"})
    assert isinstance(settings, GradientMatching)
    rows = {key: torch.zeros(1, 2) for key in (LABELS, "private:head.weight")}
    moved = Adam(replace(settings, langevin=0.0), []).step(rows, {key: torch.tensor([[3.0, -2.0]]) for key in rows})
    torch.testing.assert_close(moved[LABELS], torch.tensor([[-size, size]]))
    torch.testing.assert_close(moved["private:head.weight"], torch.tensor([[-0.01, 0.01]]))


def test_known_labels_are_used_and_said() -> None:
    task, images = worlds.task(), worlds.images(2, "known")
    view, truth = shared_by(task, one_step(), images, ThreatModel(knows_labels=True))
    found = attacks.build({"name": "ig", "iterations": 5})(view)
    assert isinstance(found, Reconstruction)
    assert found.labels is not None
    assert torch.equal(found.labels, truth.labels)
    assert found.knowledge == ("labels",)


def test_unknown_labels_of_a_batch_are_searched_for_where_none_can_be_read_off() -> None:
    view, truth = shared_by(worlds.task(), one_step(), worlds.images(2, "joint"))
    headless = replace(view, update={n: v for n, v in view.update.items() if not n.startswith("head.")})
    found = attacks.build({"name": "ig", "iterations": 5})(headless)
    assert isinstance(found, Reconstruction)
    assert found.labels is not None
    assert found.labels.shape == (2,)
    refused = attacks.build("idlg")(headless)
    assert "label" in refused.reason  # type: ignore[union-attr]
    for name in ("ig", "idlg"):
        read = attacks.build({"name": name, "iterations": 2})(view)
        assert torch.equal(read.labels, truth.labels.sort().values)  # type: ignore[union-attr]


def test_what_the_server_does_not_know_is_said() -> None:
    task, images = worlds.task(), worlds.images(1, "unknown")
    for threat, word in (
        (ThreatModel(knows_schedule=False), "schedule is unknown.*surrogate\\+"),
        (ThreatModel(knows_batch_size=False), "number of images"),
    ):
        view, _ = shared_by(task, one_step(), images, threat)
        assert re.search(word, attacks.build("ig")(view).reason)  # type: ignore[union-attr]


def test_a_search_that_blows_up_keeps_its_best_finite_iterate() -> None:
    view, _ = tiny_views(1)[0]
    found = attacks.build({"name": "dlg", "iterations": 30, "lr": 1e6})(view, seed=0)
    assert isinstance(found, Reconstruction)
    assert found.inputs is not None
    assert found.inputs.isfinite().all()
    assert found.objective <= 1.0


@pytest.mark.parametrize(("schedule", "kept"), [("step", 14), ("cosine", 14), ("none", 0)])
def test_an_iterate_of_large_steps_is_not_kept_for_its_objective(schedule: str, kept: int) -> None:
    search = attacks.build({"name": "ig", "iterations": 16, "schedule": schedule})
    assert isinstance(search, GradientMatching)
    watch = BestIterates({INPUTS: torch.zeros(2, 1)}, Adam(search, []).final_phase_start)
    for iteration in range(17):  # the objective rises all the time, and the images tell the iteration
        watch.update(iteration, torch.tensor([1.0 + iteration] * 2), {INPUTS: torch.full((2, 1), float(iteration))})
    assert [float(row[INPUTS]) for row, *_ in watch.results()] == [kept, kept]


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"iterations: expected a (whole )?number >= 1, got 0"):
        attacks.build({"name": "ig", "iterations": 0})
    for key in ("tv_weight", "lr", "label_lr", "private_lr"):
        with pytest.raises(ValueError, match=f"ig.{key}: expected a number >= 0.*, got -1"):
            attacks.build({"name": "ig", key: -1})
    with pytest.raises(ValueError, match="did you mean 'ig'"):
        attacks.build("igg")
    with pytest.raises(ValueError, match="rewrites views"):
        attacks.build("ig+dlg")


def test_an_update_without_information_is_refused() -> None:
    view, _ = tiny_views(1)[0]
    zero = replace(view, update={name: value * 0 for name, value in view.update.items()})
    broken = replace(view, update={**view.update, "head.bias": torch.full((3,), torch.nan, dtype=torch.float64)})
    for name in ("ig", "dlg", "idlg"):
        assert "zero" in attacks.build(name)(zero).reason  # type: ignore[union-attr]
        assert "finite" in attacks.build(name)(broken).reason  # type: ignore[union-attr]


def test_a_distance_does_not_depend_on_an_unknown_factor() -> None:
    view, truth = tiny_views(1)[0]
    clipped = {name: value * 0.05 for name, value in view.update.items()}
    row = {"inputs": (truth.inputs - torch.tensor(view.task.mean)) / torch.tensor(view.task.std)}
    for scaled, least in ((False, 0.5), (True, 0.0)):
        problem = MatchingProblem(replace(view, update=clipped, scale_unknown=scaled), truth.labels, "l2")
        value, _ = ProblemBatch([problem]).evaluate({k: v[None] for k, v in row.items()})
        assert value.item() >= least
    assert value.item() < 1e-12


@pytest.mark.parametrize("objective", ["l1", "simlocal"])
@pytest.mark.parametrize("name", ["ig", "joint"])
def test_further_distances_fall_in_a_search(objective: str, name: str) -> None:
    """Also of an update in factored form."""
    method = one_step() if name == "ig" else worlds.one_step(HyperFL.example())
    view = worlds.federation(method).observe(1, data=worlds.images(1, "victim"))[0]
    result = attacks.build({"name": name, "iterations": 150, "objective": objective})(view, seed=0)
    assert isinstance(result, Reconstruction)
    assert result.history[-1] < 0.6 * result.history[0]


@pytest.mark.parametrize("objective", ["l2", "cosine"])
def test_a_guess_that_points_away_is_told_where_to_turn(objective: str) -> None:
    view, truth = tiny_views(1)[0]
    opposed = {name: value * -0.05 for name, value in view.update.items()}
    guess = torch.rand(1, *truth.inputs.shape, generator=stream(0, "away")).double()
    problem = MatchingProblem(replace(view, update=opposed, scale_unknown=True), truth.labels, objective)
    value, grads = ProblemBatch([problem]).evaluate({INPUTS: guess})
    assert value.item() > 1
    assert grads[INPUTS].abs().max() > 1e-6


def pinned(frozen: float, constant: float) -> ServerView:
    """One image's update of a network that differs from others of its kind in what nobody trains or sends."""
    given = worlds.task(normalize=True)
    model = copy.deepcopy(given.model)
    first = model.get_submodule("body.conv1")
    first.weight.requires_grad_(False).mul_(frozen)  # type: ignore[operator]
    model.get_buffer("normalize.mean").mul_(constant)
    return shared_by(replace(given, model=model), one_step(), worlds.images(1, "pinned"))[0]


def test_networks_with_other_constants_share_no_stack() -> None:
    views = [pinned(1.0, 1.0), pinned(-1.0, 1.0), pinned(1.0, 0.5), pinned(1.0, 1.0)]
    keys = [MatchingProblem(view, torch.tensor([0]), "cosine").key for view in views]
    assert keys[0] == keys[3]
    assert len(set(keys)) == 3
    attack = attacks.build({"name": "ig", "iterations": 3})
    together, alone = attack.run(views[:2], [1, 1])[1], attack(views[1], seed=1)
    assert isinstance(together, Reconstruction)
    assert isinstance(alone, Reconstruction)
    assert together.objective == alone.objective


@pytest.mark.parametrize("batch_size", [1, None])
def test_labels_read_off_are_dealt_out_where_the_order_is_known(batch_size: int | None) -> None:
    """In ascending order they would be given to the wrong images, and the truth would be no solution."""
    images = Batch(worlds.images(3, "order").inputs, torch.tensor([2, 0, 1]))
    method = FedAvg(lr=0.05, epochs=2, batch_size=batch_size)
    view, _ = shared_by(worlds.task(), method, images, ThreatModel(knows_order=True))
    attack = attacks.build("ig")
    assert isinstance(attack, GradientMatching)
    problem = attack.build_problem(view)
    if batch_size is None:
        assert problem.labels is not None
        assert problem.labels.tolist() == [0, 1, 2]
        return
    assert problem.labels is None
    dealt = [attack.initial_variables(problem, 0, restart)[LABELS] for restart in range(20)]
    assert all(logits.sum() == 3 * CONFIDENT_LOGIT for logits in dealt)
    assert [2, 0, 1] in [logits.argmax(1).tolist() for logits in dealt]
    assert attack.build_problem(replace(view, labels=images.labels)).labels is images.labels


@pytest.mark.parametrize(("steps", "batch_norm"), [(1, False), (4, False), (1, True)])
def test_labels_read_off_a_group_are_dealt_out_where_it_matters_whose_they_are(steps: int, batch_norm: bool) -> None:
    """Each client's later steps follow its own images, and its batch norm normalizes by them."""
    data = [Batch(worlds.images(2, i).inputs, torch.tensor([0, 2])) for i in range(2)]
    method = FedAvg(lr=0.1, steps=steps, batch_size=None)
    client = Client(worlds.task(batch_norm=batch_norm), method, SecAgg(group_size=2))
    view, _ = Federation(client, [ClientData(part, part) for part in data]).observe(0)
    attack = attacks.build("ig")
    assert isinstance(attack, GradientMatching)
    labels = attack.build_problem(view).labels
    assert (labels is None) == (steps > 1 or batch_norm)
    assert labels is None or labels.tolist() == [0, 0, 2, 2]


def test_a_group_is_not_advised_to_be_taken_for_one_step() -> None:
    run = worlds.federation(FedAvg(lr=0.1, steps=4), SecAgg(group_size=2), rounds=0)
    for settings, threat in (({}, ThreatModel(knows_schedule=False)), ({"memory_limit_gib": 1e-9}, ThreatModel())):
        found = attacks.build({"name": "ig", **settings})(run.observe(0, threat=threat)[0])
        assert isinstance(found, NotApplicable)
        assert "surrogate" not in found.reason


def test_a_group_that_fed_no_image_is_not_searched_though_decay_was_clipped() -> None:
    method = FedAvg(lr=0.1, steps=1, batch_size=1, sampler="poisson", weight_decay=1.0)
    client = Client(worlds.task(), method, Chain(parts=(Clip(max_norm=1e-3), SecAgg(group_size=2))))
    data = [ClientData(part, part) for part in (worlds.images(9, i) for i in range(2))]
    seeds = (Federation(client, data, seed=seed).observe(0)[0] for seed in range(99))
    view = next(view for view in seeds if not view.batch_size)
    found = attacks.build({"name": "ig", "iterations": 1})(view)
    assert isinstance(found, NotApplicable)
    assert "no client of the group" in found.reason


@pytest.mark.parametrize("clients", [1, 2])
def test_private_running_statistics_are_refused(clients: int) -> None:
    task, method = worlds.task(batch_norm=True), FedBN(lr=0.1, steps=1, train_mode=False)
    view, _ = worlds.federation(method, SecAgg(group_size=2) if clients == 2 else None, task, rounds=0).observe(0)
    for name in ("ig", "gradinversion", "rog"):
        found = attacks.build({"name": name, "iterations": 2})(view)
        assert isinstance(found, NotApplicable)
        assert "running_mean' is private" in found.reason
    view, _ = worlds.federation(replace(method, train_mode=True), None, task, rounds=0).observe(0)
    assert isinstance(attacks.build({"name": "ig", "iterations": 2})(view), Reconstruction)
