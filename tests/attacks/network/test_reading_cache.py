"""While an attack runs a network is traced once, and what another one computes is never taken for it."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

from attacks.base import Reconstruction, build
from attacks.network import layer_chain, reading_cache
from attacks.network.layer_chain import trace_view
from attacks.network.reading_cache import readings_cached
from fl.capture import from_batch
from fl.seeds import stream
from fl.tensors import scale_tensors
from fl.view import ServerView


def seen(seed: int = 0) -> ServerView:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 3))
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randn(value.shape, generator=stream(seed, "weights")) / 4)
    return from_batch(model, torch.rand(1, 1, 8, 8, generator=stream(0, "image")), torch.tensor([1]))[0]


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images each trace was of."""
    made: list[int] = []
    trace = layer_chain.trace_operations

    def counted(model: nn.Module, images: torch.Tensor) -> object:
        made.append(len(images))
        return trace(model, images)

    monkeypatch.setattr(layer_chain, "trace_operations", counted)
    return made


def test_views_that_differ_in_what_came_back_share_a_trace(traced: list[int]) -> None:
    view = seen()
    other = replace(view, update=scale_tensors(view.update, 2.0))
    assert other.client is view.client
    with readings_cached():
        assert trace_view(view) is trace_view(other)
        assert traced == [1, 1]  # of two images
        trace_view(view, count=2)
        assert traced == [1, 1, 2, 2]
    assert trace_view(view) is not trace_view(view)


def test_other_numbers_are_another_network() -> None:
    view = seen()
    moved = replace(view, shared={name: value + 1 for name, value in view.shared.items()})  # type: ignore[operator]
    with readings_cached():
        first, second = trace_view(view), trace_view(moved)
        assert isinstance(first, tuple)
        assert isinstance(second, tuple)
        assert not torch.equal(first[1].nodes[-1].outputs[0], second[1].nodes[-1].outputs[0])


def test_attacks_within_one_another_share_what_was_read(traced: list[int]) -> None:
    view = seen()
    apart = build("analytic")(view)
    alone = len(traced)
    with readings_cached():
        first, again = build("analytic")(view), build("analytic")(view)
    assert len(traced) - alone < 2 * alone
    for found in (apart, first, again):
        assert isinstance(found, Reconstruction)
        assert found.verified
        assert torch.equal(found.inputs, apart.inputs)  # type: ignore[arg-type, union-attr]


def test_large_networks_and_many_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    view = seen()
    with readings_cached():
        monkeypatch.setattr(reading_cache, "MAX_NUMBERS", 10)
        assert trace_view(view) is not trace_view(view)
        monkeypatch.setattr(reading_cache, "MAX_NUMBERS", 10_000)
        monkeypatch.setattr(reading_cache, "MAX_KEPT", 1)
        first = trace_view(view)
        assert trace_view(view) is first
        trace_view(view, count=2)
        assert trace_view(view) is not first


def test_threads_have_clients_of_their_own() -> None:
    """Torch puts weights into a network while it runs."""
    view, found = seen(), []
    other = replace(view, update=scale_tensors(view.update, 2.0))
    thread = threading.Thread(target=lambda: found.append(other.client))
    thread.start()
    thread.join()
    assert found[0] is not view.client
