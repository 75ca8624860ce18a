"""Holding a result to its update ends soon after the time limit, and the result is kept."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from attacks.analytic import input_scale
from attacks.analytic.cascade import Cascade
from attacks.base import Attack, Reconstruction, build
from attacks.labels.assignment import assign_labels
from attacks.network.operation_trace import Ref, trace_operations
from attacks.search_control import SearchControl, StoppedError
from fl.capture import from_batch
from fl.models.building_blocks.initialization import initialize
from fl.seeds import stream


@pytest.fixture
def clock(monkeypatch):
    """The time, which stands still but where a test moves it."""
    now = [0.0]
    monkeypatch.setattr("attacks.search_control.time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


PIXELS = torch.rand(1, 1, 4, 4, generator=stream(0, "in time"))


def view():
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
    return from_batch(net, PIXELS, torch.tensor([1]))[0]


@pytest.mark.parametrize("seconds_over", [0.9, 1.1])
def test_a_result_that_the_time_limit_leaves_unchecked_is_kept_and_not_confirmed(monkeypatch, clock, seconds_over):
    """A tenth of the time is left beyond the limit, whatever the attack has overdrawn by itself."""
    confirm = Attack.confirm

    def slowly(self, view, result):
        clock[0] = 10.0 + seconds_over
        return confirm(self, view, result)

    monkeypatch.setattr(Attack, "confirm", slowly)
    found = build("analytic")(view(), control=SearchControl(time_limit=10.0))
    in_time = seconds_over < 1
    assert isinstance(found, Reconstruction)
    torch.testing.assert_close(found.inputs, PIXELS, atol=1e-4, rtol=0)
    assert found.verified is (True if in_time else None)
    assert bool(found.cut_short) is not in_time
    assert ("not confirmed: not held to the update before the time limit" in found.note) is not in_time


@pytest.mark.parametrize("seconds_over", [9.0, 11.0])
def test_a_result_that_an_interrupt_leaves_unchecked_is_kept_and_not_confirmed(monkeypatch, clock, seconds_over):
    """Ten seconds are left beyond an interrupt where no time limit says how many."""
    confirm, control = Attack.confirm, SearchControl()

    def slowly(self, view, result):
        control.interrupt()
        clock[0] = seconds_over
        return confirm(self, view, result)

    monkeypatch.setattr(Attack, "confirm", slowly)
    found = build("analytic")(view(), control=control)
    in_time = seconds_over < 10
    assert isinstance(found, Reconstruction)
    torch.testing.assert_close(found.inputs, PIXELS, atol=1e-4, rtol=0)
    assert found.verified is (True if in_time else None)
    assert ("not confirmed: not held to the update before an interrupt" in found.note) is not in_time


@pytest.mark.parametrize("is_share", [False, True])
@pytest.mark.parametrize("is_begun", [False, True])
def test_what_is_held_to_its_update_ends_ten_seconds_after_an_interrupt_at_most(clock, is_begun, is_share):
    whole = SearchControl()
    one = whole.share(3) if is_share else whole
    begun = one.overtime() if is_begun else None
    clock[0] = 5.0
    whole.interrupt()
    control = begun or one.overtime()
    for clock[0], stopped in ((5.0, ""), (14.9, ""), (15.1, "an interrupt")):
        assert control.stop_reason() == stopped


@pytest.mark.parametrize(("limit", "over"), [(18.0, 1.8), (60.0, 6.0), (3600.0, 10.0)])
def test_what_is_held_to_its_update_ends_a_tenth_beyond_the_limit_at_most(clock, limit, over):
    control = SearchControl(time_limit=limit)
    for one in (control, control.share(3)):
        clock[0] = 0.0
        end = one.deadline + over
        assert one.overtime().deadline == pytest.approx(end)
        clock[0] = 5.0  # from where it is asked does not matter
        assert one.overtime().deadline == pytest.approx(end)


def test_a_transposed_weight_is_its_parameter_by_its_memory():
    """Of many numbers nothing is sorted, and places beyond the digits of single precision are right."""
    layer = nn.Linear(4100, 4100, bias=False)
    graph = trace_operations(layer, torch.rand(1, 4100))
    (turned,) = [Ref(n) for n, node in enumerate(graph.nodes) if node.operation == "t"]
    name, places = graph.as_parameter(turned)
    assert name == "weight"
    assert torch.equal(layer.weight.flatten()[places], layer.weight.T)


def test_what_an_attack_holds_to_the_update_itself_is_kept_where_the_time_limit_ends_that(monkeypatch):
    def stop(*_):
        raise StoppedError("the time limit")

    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 3))
    initialize(net, stream(0, "in time"))
    pictures = torch.rand(2, 1, 4, 4, generator=stream(0, "two in time"))
    two = from_batch(net, pictures, torch.tensor([1, 2]))[0]
    monkeypatch.setattr("attacks.analytic.single_image_rows.SingleImageRows.holds_single_image", lambda *_, **__: False)
    assert build("analytic")(two).verified is True
    monkeypatch.setattr("attacks.analytic.analytic.reproduces_update", stop)
    found = build("analytic")(two)
    assert isinstance(found, Reconstruction), found
    assert found.verified is None
    assert found.cut_short == "not held to the update before the time limit"
    assert (found.inputs[:, None] - pictures).flatten(2).abs().amax(2).amin(1).max() < 1e-3


POOLED = (nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(96, 5))
CONVOLUTIONS = (nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 40, 3, padding=1), nn.ReLU())
FLAT = (nn.Conv2d(1, 24, 3, padding=1), nn.LeakyReLU(0.1), nn.Flatten(), nn.Linear(384, 5))
AVERAGED = (*CONVOLUTIONS, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(40, 5))


@pytest.mark.parametrize(
    ("attack", "module", "layers"),
    [
        ("cascade", "cascade", POOLED),
        ("backsolve", "backsolve", AVERAGED),
        ("rconv", "recursive.layerwise_inversion", FLAT),
    ],
)
@pytest.mark.parametrize("seconds_over", [0.5, 2.0])
def test_pictures_are_not_lost_where_the_time_limit_comes_before_their_labels(
    monkeypatch, clock, attack, module, layers, seconds_over
):
    # which else names the labels as it tells two images apart
    monkeypatch.setattr("attacks.analytic.recursive.start_signal._separate_at_classifier", lambda *_: "not asked")
    net = nn.Sequential(*layers)
    initialize(net, stream(0, "in time"))
    pictures = torch.rand(2, 1, 4, 4, generator=stream(0, "two in time"))
    two = from_batch(net, (255 * pictures).round() / 255, torch.tensor([1, 2]))[0]
    found = build(attack)(two)

    def slowly(*given):
        clock[0] = 10.0 + seconds_over
        return assign_labels(*given)

    monkeypatch.setattr(f"attacks.analytic.{module}.assign_labels", slowly)
    control = SearchControl(time_limit=10.0)
    late = build(attack)(two, control=control)
    assert isinstance(late, Reconstruction), late
    torch.testing.assert_close(late.inputs, found.inputs)
    in_time = seconds_over < 1
    assert late.verified is (found.verified if in_time else found.verified and None)
    assert control.cut_short_by == ("" if in_time else "the time limit")
    assert (late.labels is None) is not (in_time and found.labels is not None)


def test_what_is_left_undecided_at_the_time_limit_says_so_where_nothing_else_is_tried(monkeypatch):
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 24, bias=False), nn.ReLU(), nn.Linear(24, 5))
    initialize(net, stream(0, "in time"))
    undecided = Reconstruction(inputs=PIXELS, objective=1.0, verified=True).left_unchecked("the time limit")
    monkeypatch.setattr("attacks.analytic.input_scale.judge_targets", lambda *_: undecided)
    found = input_scale.invert_direction(from_batch(net, PIXELS, torch.tensor([1]))[0], 1e-4)
    assert found.cut_short == "not held to the update before the time limit"


def test_a_picture_is_not_lost_where_the_time_limit_ends_what_comes_after_it(monkeypatch):
    """What else may explain the update, and earlier rounds on the same image."""

    def stop(*_):
        raise StoppedError("the time limit")

    held = Reconstruction(inputs=PIXELS, objective=0.5, verified=False, note="too few equations")
    monkeypatch.setattr(Cascade, "_solve_chain", lambda *_: held)
    monkeypatch.setattr("attacks.analytic.cascade._finish", stop)
    found = Cascade().attack_view(view(), 0)
    assert found.inputs is PIXELS
    assert found.cut_short == "not done before the time limit: what else explains it"
    earlier = view()
    monkeypatch.setattr("attacks.analytic.cascade.rounds_on_same_images", lambda _: [earlier])
    monkeypatch.setattr(Cascade, "_attack_round", lambda _, one, __: stop() if one is earlier else held)
    found = Cascade().attack_view(view(), 0)
    assert found.inputs is PIXELS
    assert found.cut_short == "not done before the time limit: earlier rounds"
