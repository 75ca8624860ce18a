"""Clients trained in stacks: the numbers of the loop, up to rounding, or the loop itself."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from support import worlds
from support.compare import assert_near, assert_same
from support.probes import DPSGD, MOVING

from defenses.mixup import Mixup
from defenses.noise import Noise
from fl.client import Client
from fl.data.augment import CropFlip
from fl.defense import Defense
from fl.engines import Factored, Processes, Vectorized, choose, process, vectorized
from fl.engines.sequential import Engine
from fl.federation import ClientData, Federation
from fl.method import Method
from fl.methods.dp_fedavg import DPFedAvg
from fl.methods.fedavg import FedAvg
from fl.methods.fedbn import FedBN
from fl.methods.fedper import FedPer
from fl.methods.fedprox import FedProx
from fl.methods.fedsam import FedSAM
from fl.methods.hyperfedzero import HyperFedZero
from fl.methods.hyperfl import HyperFL
from fl.methods.moon import Moon
from fl.methods.scaffold import Scaffold
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
from fl.tensors import Tensors, dense
from fl.types import Phase, Task

CLIPPED: dict[str, Any] = {**MOVING, "max_norm": 0.5, "weight_decay": 1e-2}
HYPERFL = HyperFL(epochs=1, batch_size=2, parametrization=Hypernetwork.example())


@dataclass(frozen=True, kw_only=True)
class TwoPhases(FedPer):
    """Trains the classifier, then everything, by Adam."""

    name = "two-phases"

    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        (main,) = super().phases(task, round)
        head = replace(main.groups[0], prefixes=("head.",))
        return replace(main, groups=(head,)), replace(main, optimizer="adam", momentum=0.0)


@dataclass(frozen=True, kw_only=True)
class Remembers(FedAvg):
    """Keeps something from its first round on, which it has not before."""

    name = "remembers"

    def gradient(self, grad: Any, params: Tensors, batches: Any, step: Any) -> Tensors:
        found = grad(params, batches[0])
        drift = step.memory.get("last", {name: torch.zeros_like(value) for name, value in found.items()})
        return {name: value + 0.1 * drift[name] for name, value in found.items()}

    def finish(self, params: Tensors, step: Any, steps: int) -> Any:
        return {"norms": {n: dense(v).norm() * steps for n, v in params.items()}}, {"last": params}


@dataclass(frozen=True, kw_only=True)
class Poisson(FedAvg):
    """Some of its batches are empty."""

    name = "poisson"

    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        return tuple(replace(phase, sampler="poisson") for phase in super().phases(task, round))


@dataclass(frozen=True, kw_only=True)
class Keyed(DPFedAvg):
    """DP-FedAvg, whose loss keeps the loop from taking Opacus: that takes seconds to import."""

    name = "keyed"

    def loss(self, network: Any, batch: Any, step: Any) -> torch.Tensor:
        return super().loss(network, batch, step)


class OwnNoise(Defense):
    """Draws from the client's generator as it likes."""

    name = "own-noise"

    def gradient(self, grad: Any, params: Any, batch: Any, generator: Any) -> Any:
        return {n: g + torch.randn(g.shape, generator=generator, dtype=g.dtype) for n, g in grad(params, batch).items()}


NORM = worlds.task(batch_norm=True)
NOISY = DPSGD(clip=0.5, noise_multiplier=1.0)
CASES: dict[str, tuple[Method, dict[str, Any]]] = {
    "momentum, decay, clipping": (FedAvg(**CLIPPED), {}),
    "private head, two phases, Adam": (TwoPhases(**MOVING), {}),
    "batch norm": (FedAvg(**CLIPPED), {"base": NORM}),
    "private batch norm": (FedBN(**MOVING), {"base": NORM}),
    "two gradients a step": (FedSAM(**MOVING), {"base": NORM}),
    "back to the start": (FedProx(**CLIPPED), {}),
    "memory and payloads": (Scaffold.example(), {}),
    "a look that moves nothing": (replace(Scaffold.example(), option="I"), {"base": NORM}),
    "memory that comes later": (Remembers(**MOVING), {}),
    "networks at rest beside": (Moon.example(), {"base": NORM}),
    "draws": (HyperFedZero.example(), {}),
    "empty batches": (Poisson(**{**MOVING, "batch_size": 1}), {}),
    "other batches": (FedAvg(**MOVING), {"defense": Mixup()}),
    "noise in the update": (FedAvg(**MOVING), {"defense": Noise(std=0.1)}),
    "noise in gradients": (FedAvg(**MOVING), {"defense": NOISY}),
    "noise by keys": (Keyed.example(), {}),
}


def federation(method: Method, engine: str, *, sizes: tuple[int, ...] = (3, 4, 5), **client: Any) -> Federation:
    """Clients of so many images each, augmented."""
    data = [ClientData(worlds.images(n, "train"), worlds.images(4, "test", n), CropFlip(padding=1)) for n in sizes]
    base = client.pop("base", None) or worlds.task()
    return Federation(Client(base, method, **client), data, engine=engine)  # type: ignore[arg-type]


def refuse(*_: Any) -> Any:
    raise AssertionError("a client was trained by the loop")


@pytest.mark.parametrize("name", CASES)
def test_stacks_equal_the_loop_over_full_rounds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, settings = CASES[name]
    loop, stacked = (federation(method, engine, **settings) for engine in ("loop", "vmap"))
    monkeypatch.setattr(vectorized, "train", refuse)
    stacked.client_fraction = loop.client_fraction = 0.67  # two of three: those who took part have memory
    for round in range(2):
        if round:
            stacked.client_fraction = loop.client_fraction = 1.0
        ends = [run.run_round(evaluate=True) for run in (loop, stacked)]
        for mine, other in zip(*reversed(ends), strict=True):
            assert mine.accuracy == other.accuracy
            assert mine.state.memory.keys() == other.state.memory.keys()
            assert_near({"update": _joined(mine.upload.update)}, {"update": _joined(other.upload.update)}, 1e-12)
            assert_near(mine.state.private, other.state.private, 1e-12)
            assert_near(mine.result.buffers, other.result.buffers, 1e-12)
            for part, values in other.state.memory.items():
                assert_near({part: _joined(mine.state.memory[part])}, {part: _joined(values)}, 1e-12)
            for part, values in other.upload.extra.items():
                assert_near({part: _joined(mine.upload.extra[part])}, {part: _joined(values)}, 1e-12)
        assert_near(stacked.server.shared, loop.server.shared, 1e-12)
        assert_near(stacked.server.buffers, loop.server.buffers, 1e-12)
    assert bool(_joined(ends[1][0].upload.update).any())
    sizes = {len(batch) for one in ends[1] for steps in one.trace.order for (batch,) in steps}
    assert len(sizes) > 1
    if settings.get("base") is NORM:
        assert all(int(one.result.buffers["body.norm1.num_batches_tracked"]) for one in ends[1])


def _joined(values: Tensors) -> torch.Tensor:
    """All numbers: a gradient that is zero but for rounding, a bias before batch norm, has no digits of its own."""
    return torch.cat([dense(value).flatten() for value in values.values()])


def test_a_stack_lasts_as_long_as_its_members_feed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Counted(vectorized._Stack):
        def __init__(self, members: Any, phase: Phase) -> None:
            made.append(len(members))
            super().__init__(members, phase)

    monkeypatch.setattr(vectorized, "_Stack", Counted)
    federation(FedAvg(**MOVING), "vmap", sizes=(3, 3, 3)).run_round()
    assert made == [3]
    made.clear()
    federation(FedAvg(**{**MOVING, "epochs": 1}), "vmap").run_round()
    assert made == [3, 1, 2, 1]  # 2, 2, 2 images; then 1, and 2, 2; then the last client's fifth image


def test_chunks_do_not_touch_each_other() -> None:
    whole, parts = (federation(FedAvg(**CLIPPED), "vmap") for _ in range(2))
    parts._engine.chunk = 2
    for run in (whole, parts):
        run.run_round()
    assert_near(parts.server.shared, whole.server.shared, 1e-12)


class InTurn:
    """Workers that are none: everything happens here, one after the other."""

    def __init__(self, _: int, begin: Any, *given: Any) -> None:
        begin(*(ForkingPickler.loads(ForkingPickler.dumps(x)) for x in given))

    def submit(self, work: Any, *given: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*given))
        return done

    def result(self, task: Future[Any]) -> Any:
        return task.result()


def test_processes_give_the_bits_of_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "Workers", InTurn)
    alone, spread = (federation(FedAvg(**MOVING), "vmap", base=NORM) for _ in range(2))
    alone._engine.chunk = 2
    spread._engine = Processes(alone._engine, 2)
    for run in (alone, spread):
        run.run_round()
    assert_same(spread.server.shared, alone.server.shared)
    assert_same(spread.server.buffers, alone.server.buffers)


def test_noise_that_cannot_be_stacked_gives_the_bits_of_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    loop, stacked = (federation(FedAvg(**MOVING), engine, defense=OwnNoise()) for engine in ("loop", "vmap"))
    assert isinstance(stacked._engine, Vectorized)
    with caplog.at_level(logging.INFO, "fl"):
        for _ in range(2):
            for run in (loop, stacked):
                run.run_round()
    assert_same(stacked.server.shared, loop.server.shared)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("fedavg is trained by the loop engine: TypeError: randn()")


def test_stacks_are_for_gpus_and_plain_parameters(caplog: pytest.LogCaptureFixture) -> None:
    plain, structured = (Client(worlds.task(), method) for method in (FedAvg(), HYPERFL))
    assert type(choose("vmap", plain)) is Vectorized
    assert type(choose("auto", plain)) is Engine
    with caplog.at_level(logging.INFO, "fl"):
        assert type(choose("auto", structured)) is Factored
        assert not caplog.records
        assert type(choose("vmap", structured)) is Engine
    assert "structured" in caplog.records[0].getMessage()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_stacks_equal_the_loop_on_cuda(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, settings = CASES[name]
    base = settings.get("base", worlds.task()).to(device="cuda")
    runs = [federation(method, engine, **{**settings, "base": base}) for engine in ("loop", "auto")]
    assert isinstance(runs[1]._engine, Vectorized)
    monkeypatch.setattr(vectorized, "train", refuse)
    for run in runs:
        run.data = [
            replace(own, train=worlds.moved(own.train, "cuda"), test=worlds.moved(own.test, "cuda")) for own in run.data
        ]
        run.run_round()
    assert_near(runs[1].server.shared, runs[0].server.shared, 1e-9)
    assert_near(runs[1].server.buffers, runs[0].server.buffers, 1e-9)
