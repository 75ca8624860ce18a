"""A module is called with explicit weights, and keeps its own."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from fl.network import Network, call_with
from fl.seeds import stream


class Twice(nn.Module):
    """The same layer under two names, and one weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.steps = nn.Sequential(self.first, nn.BatchNorm1d(3), self.second)
        self.third.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.third(self.steps(x))
        return out


def test_a_module_with_two_names_has_its_own_tensors_after_a_call() -> None:
    model = Twice().eval()
    before = dict(model.named_parameters())
    weights = {name: torch.full_like(value, 2.0) for name, value in before.items()}
    buffers = dict(model.named_buffers())
    x = torch.rand(2, 3)
    for _ in range(3):
        out = Network(model, weights, buffers)(x)
        after = dict(model.named_parameters())
        assert all(value is before[name] and isinstance(value, nn.Parameter) for name, value in after.items())
        assert after.keys() == before.keys()
    inner = nn.functional.linear(x, torch.full((3, 3), 2.0), torch.full((3,), 2.0)) / (1 + 1e-5) ** 0.5 * 2 + 2
    for _ in range(2):
        inner = nn.functional.linear(inner, torch.full((3, 3), 2.0), torch.full((3,), 2.0))
    torch.testing.assert_close(out, inner)


def test_a_module_with_two_names_has_its_own_tensors_after_a_call_with_some() -> None:
    model, x = Twice().eval(), torch.rand(2, 3)
    before, own = dict(model.named_parameters()), model(x)
    twice = {"second.weight": 2 * model.second.weight.detach()}  # of the third layer, too, and of the steps' second
    for _ in range(2):
        out = call_with(model, twice, x)
        assert all(value is before[name] for name, value in model.named_parameters())
        inner = nn.functional.linear(model.steps[:2](x), twice["second.weight"], model.second.bias)
        torch.testing.assert_close(out, nn.functional.linear(inner, twice["second.weight"], model.third.bias))
        torch.testing.assert_close(model(x), own)


def test_what_is_missing_is_named() -> None:
    model = Twice()
    weights = {name: value.detach() for name, value in model.named_parameters() if not name.startswith("second")}
    with pytest.raises(RuntimeError, match="second"):
        Network(model, weights, dict(model.named_buffers()))(torch.rand(2, 3))


class Checkpointed(nn.Module):
    """Drops what its first layers compute, to compute it anew in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(6, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint.checkpoint(self.body, self.first(x), use_reentrant=self.reentrant)
        logits: Tensor = self.head(hidden)
        return logits


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_compute_with_the_weights_that_were_given(reentrant: bool) -> None:
    model = Checkpointed(reentrant)
    own = {name: value.detach().clone() for name, value in model.named_parameters()}
    x = torch.rand(2, 6, generator=stream(0, "checkpoint"))

    def slopes(of: nn.Module) -> dict[str, Tensor]:
        given = {name: (3 * value).requires_grad_() for name, value in own.items()}
        found = Network(of, given, {})(x).square().sum()
        return dict(zip(given, torch.autograd.grad(found, list(given.values())), strict=True))

    class Plain(Checkpointed):
        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(self.body(self.first(x)))
            return logits

    plain = slopes(Plain(reentrant))
    for name, value in slopes(model).items():
        torch.testing.assert_close(value, plain[name])
    assert checkpoint.CheckpointFunction.__module__ == checkpoint.__name__


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_thread_keeps_its_checkpoints_off_while_another_leaves(reentrant: bool) -> None:
    """The first thread is between two layers when the second begins, and the second still is when the first ends."""
    first_inside, second_inside, first_left = (threading.Event() for _ in range(3))
    x, failed = torch.rand(2, 6, generator=stream(0, "checkpoint")), []

    class Waiting(Checkpointed):
        inside, wait = first_inside, second_inside

        def forward(self, x: Tensor) -> Tensor:
            self.inside.set()
            assert self.wait.wait(60)
            return super().forward(x)

    class WaitingLonger(Waiting):
        inside, wait = second_inside, first_left

    def slopes(model: nn.Module, left: threading.Event) -> None:
        try:
            given = {n: (3 * v.detach()).requires_grad_() for n, v in model.named_parameters()}
            logits = Network(model, given, {})(x)
            left.set()
            plain = given["head.weight"] @ model_body(given, x).T + given["head.bias"][:, None]
            each = [torch.autograd.grad(out.square().sum(), list(given.values())) for out in (logits, plain.T)]
            for one, other in zip(*each, strict=True):
                torch.testing.assert_close(one, other)
        except (AssertionError, RuntimeError) as error:  # which a thread does not raise in the test
            failed.append(error)
        finally:
            left.set()

    def model_body(given: dict[str, Tensor], x: Tensor) -> Tensor:
        hidden = nn.functional.linear(x, given["first.weight"], given["first.bias"])
        for number in (0, 2):
            hidden = nn.functional.linear(hidden, given[f"body.{number}.weight"], given[f"body.{number}.bias"]).tanh()
        return hidden

    own = {name: getattr(checkpoint, name) for name in ("_checkpoint_hook", "CheckpointFunction")}
    threads = [threading.Thread(target=slopes, args=(Waiting(reentrant), first_left))]
    threads.append(threading.Thread(target=slopes, args=(WaitingLonger(reentrant), threading.Event())))
    for thread in threads:
        thread.start()
        assert first_inside.wait(60)
    for thread in threads:
        thread.join(60)
    assert not failed
    assert own == {name: getattr(checkpoint, name) for name in own}


def test_checkpoints_of_other_threads_stay() -> None:
    computed = []

    class Beside(Checkpointed):
        def forward(self, x: Tensor) -> Tensor:
            other = Checkpointed(False)
            other.body.register_forward_pre_hook(lambda *_: computed.append(1))
            thread = threading.Thread(target=lambda: other(x).sum().backward())
            thread.start()
            thread.join(60)
            return super().forward(x)

    model = Beside(False)
    Network(model, dict(model.named_parameters()), {})(torch.rand(2, 6, generator=stream(0, "checkpoint")))
    assert len(computed) == 2  # and once more in its backward pass
    assert checkpoint._checkpoint_hook.__module__ == checkpoint.__name__
