from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from support import matrix, worlds
from support.compare import assert_near, assert_same
from support.probes import PROBES

from defenses.noise import Noise
from fl.client import Client
from fl.data.augment import CropFlip
from fl.defense import Defense, overrides
from fl.engines import Factored, Processes, choose
from fl.engines.factored.heads import Heads
from fl.engines.sequential import Engine
from fl.federation import ClientData, Federation
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork, head_bias, head_weight
from fl.runtime import workers
from fl.runtime.interprocess_packing import flatten, pack, unpack
from fl.simulation.client_round import Round
from fl.tensors import LowRank, Term, dense
from fl.types import Phase, Task

TINY = Hypernetwork(embedding=4, hidden=24, init="scaled")  # more hidden units than local steps
HYPERFL = HyperFL(lr=0.05, epochs=3, batch_size=2, max_norm=0.5, weight_decay=1e-2, parametrization=TINY)
SETTINGS = {f.name: getattr(HYPERFL, f.name) for f in fields(HYPERFL)}


def federation(method: Method, engine: str, workers: int = 1, **client: Any) -> Federation:
    """Three clients of 3, 4 and 5 images."""
    data = [ClientData(worlds.images(n, "train"), worlds.images(4, "test", n), CropFlip(padding=1)) for n in (3, 4, 5)]
    return Federation(Client(worlds.task(), method, **client), data, engine=engine, workers=workers)  # type: ignore[arg-type]


class Joint(HyperFL):
    """HyperFL with everything in one phase, and Nesterov's momentum."""

    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        head, main = super().phases(task, round)
        return (replace(main, groups=(*main.groups, *head.groups), nesterov=True),)


VARIANTS: dict[str, Method] = {
    "as published": HYPERFL,
    "published init": replace(HYPERFL, parametrization=replace(TINY, init="published")),
    "no biases": replace(HYPERFL, parametrization=replace(TINY, bias=False)),
    "never clipped": replace(HYPERFL, max_norm=None),
    "no decay": replace(HYPERFL, weight_decay=0.0),
    "no momentum": replace(HYPERFL, momentum=0.0),
    "fixed embedding": replace(HYPERFL, learn_embedding=False),
    "no head phase": replace(HYPERFL, head_epochs=0),
    "joint": Joint(**SETTINGS),
    "units wake up": replace(HYPERFL, lr=0.5, weight_decay=0.1, momentum=0.9, max_norm=5.0),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_factored_equals_loop_over_full_rounds(name: str) -> None:
    loop, factored = (federation(VARIANTS[name], engine) for engine in ("loop", "factored"))
    for _ in range(2):
        ends = [run.run_round(evaluate=True) for run in (loop, factored)]
        for mine, other in zip(*reversed(ends), strict=True):
            assert_near(mine.upload.update, other.upload.update, 1e-12)
            assert_near(mine.state.private, other.state.private, 1e-12)
            assert mine.accuracy == other.accuracy
        assert_near(factored.server.shared, loop.server.shared, 1e-12)
    assert factors(ends[1][0])
    assert any(dense(v).any() for v in ends[1][0].upload.update.values())


def factors(done: Round) -> bool:
    """Whether a round was trained by factors: these come as one term."""
    heads = [v for v in done.upload.update.values() if isinstance(v, LowRank)]
    return bool(heads) and all(len(v.terms) == 1 and len(v.terms[0].left) > 1 for v in heads)


def test_factored_never_makes_a_matrix_of_a_head() -> None:
    update = federation(HYPERFL, "factored").run_round()[0].upload.update
    assert all(isinstance(v, LowRank) for k, v in update.items() if k.startswith("hypernet.heads.") and v.shape[1:])


@pytest.mark.parametrize("bias", [False, True])
def test_factored_leaves_silent_units_out_until_they_speak(bias: bool) -> None:
    run = federation(replace(HYPERFL, parametrization=replace(TINY, bias=bias)), "loop")
    shared = {name: dense(value) for name, value in run.server.shared.items()}
    heads = Heads(run.client, shared)
    rows = torch.cat([shared[head_weight(name)] for name in heads.slices])
    biases = [shared[head_bias(name)][:, None] for name in heads.slices if bias]
    columns = torch.cat([torch.cat(biases), rows], 1) if bias else rows
    units = columns.shape[1]
    assert (units, heads.shape) == (24 + bias, columns.shape)
    draw = torch.Generator().manual_seed(0)
    grads = torch.randn(2, len(columns), generator=draw).double()
    for speaking in ([*range(units)], [1, 5], [1], [5], [0, 1, 5, 7], [*range(1, 17)], [*range(units)]):
        h = torch.zeros(2, units).double()
        h[0, speaking], h[1, speaking[0]] = torch.randn(len(speaking), generator=draw).double(), 1.0
        heads.attend(h)
        torch.testing.assert_close(heads.forward(h), h @ columns.mT)
        torch.testing.assert_close(heads.backward(grads)[:, speaking], (grads @ columns)[:, speaking])
        assert len(heads._chosen) <= 2 * len(speaking)
        assert (heads._part is None) == (len(speaking) > 12)  # nothing is copied where most speak


def test_factored_draws_the_same_noise() -> None:
    runs = [federation(HYPERFL, engine, defense=Noise(std=0.1)) for engine in ("loop", "factored")]
    for run in runs:
        run.run_round()
    assert_near(runs[1].server.shared, runs[0].server.shared, 1e-12)


def test_poisson_batches_may_be_empty() -> None:
    class Poisson(HyperFL):
        def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
            return tuple(replace(phase, sampler="poisson") for phase in super().phases(task, round))

    method = Poisson(**{**SETTINGS, "batch_size": 1})
    loop, factored = (federation(method, engine) for engine in ("loop", "factored"))
    done = loop.run_round()
    assert factors(factored.run_round()[0])
    sizes = [len(batch) for one in done for steps in one.trace.order for (batch,) in steps]
    assert 0 in sizes
    assert max(sizes) > 1
    assert_near(factored.server.shared, loop.server.shared, 1e-12)


def test_what_does_not_factor_falls_back_to_the_loop() -> None:
    for name, probe in PROBES.items():
        client = Client(probe.task or worlds.task(), probe.method, probe.defense)
        assert type(choose("factored", client)) is (Factored if name == "hyperfl-lpm+adapters" else Engine)
    client = Client(worlds.task(), HYPERFL)
    assert type(choose("auto", client)) is Factored
    assert type(choose("loop", client)) is Engine
    clipping = next(defense for defense in matrix.COLUMNS.values() if not overrides(defense, "gradient"))
    assert type(choose("auto", Client(worlds.task(), HYPERFL, clipping))) is Factored
    assert type(choose("auto", Client(worlds.task(), HYPERFL, PerSample()))) is Engine


@dataclass(frozen=True, kw_only=True)
class Tanh(Hypernetwork):
    """Generates in another way."""

    def from_hidden(self, params: Any, hidden: Any, task: Task) -> Any:
        return super().from_hidden(params, hidden.tanh(), task)


class Remembers(HyperFL):
    """Has memory of its own."""

    def finish(self, params: Any, step: Any, steps: int) -> Any:
        return {}, {"count": {"steps": torch.tensor(float(steps))}}


@pytest.mark.parametrize(
    "method", [replace(HYPERFL, parametrization=Tanh(embedding=4, hidden=7)), Remembers(**SETTINGS)]
)
def test_what_works_otherwise_inside_is_trained_by_the_loop(method: Method) -> None:
    assert type(choose("auto", Client(worlds.task(), method))) is Engine


class Adam(HyperFL):
    """Another optimizer."""

    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        return tuple(replace(phase, optimizer="adam", momentum=0.0) for phase in super().phases(task, round)[:1])


@pytest.mark.parametrize(
    "method",
    [
        Adam(**SETTINGS),
        replace(HYPERFL, epochs=17),  # 3 * 17 steps for the largest client, 24 hidden units
    ],
)
def test_rounds_that_factors_cannot_express_give_the_bits_of_the_loop(method: Method) -> None:
    loop, factored = (federation(method, engine) for engine in ("loop", "factored"))
    assert isinstance(factored._engine, Factored)
    loop.run_round()
    factored.run_round()
    assert_same(factored.server.shared, loop.server.shared)


def test_downloads_with_payloads_are_trained_by_the_loop() -> None:
    class Talks(HyperFL):
        def broadcast(self, server: Any, client: int, task: Task) -> Any:
            return replace(super().broadcast(server, client, task), received={"extra": {"x": torch.ones(1)}})

    loop, factored = (federation(Talks(**SETTINGS), engine) for engine in ("loop", "factored"))
    loop.run_round()
    factored.run_round()
    assert_same(factored.server.shared, loop.server.shared)


def test_chunks_do_not_touch_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = federation(HYPERFL, "factored")
    whole.run_round()
    monkeypatch.setattr(Factored, "chunk", 2)
    parts = federation(HYPERFL, "factored")
    parts.run_round()
    assert_near(parts.server.shared, whole.server.shared, 1e-12)


class PerSample(Defense):
    """Looks at single gradients."""

    name = "per-sample"

    def gradient(self, grad: Any, params: Any, batch: Any, generator: Any) -> Any:
        return grad(params, batch)


class Split(HyperFL):
    """Moves the biases of the heads only: no multiple of what factors express."""

    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        (main,) = super().phases(task, round)[1:]
        return (replace(main, groups=(replace(main.groups[0], prefixes=("hypernet.trunk.",)),)),)


def test_a_round_that_does_not_factor_is_trained_by_the_loop() -> None:
    method = Split(**SETTINGS)
    loop, factored = (federation(method, engine) for engine in ("loop", "factored"))
    loop.run_round()
    factored.run_round()
    assert_same(factored.server.shared, loop.server.shared)


@pytest.mark.parametrize(("engine", "workers"), [("turbo", 1), ("loop", 0)])
def test_engines_are_checked(engine: str, workers: int) -> None:
    with pytest.raises(ValueError, match=r"expected (engine|workers)"):
        federation(HYPERFL, engine, workers)


@pytest.fixture(scope="module")
def spread() -> Iterator[dict[str, Federation]]:
    """Federations whose clients are trained by two processes."""
    runs = {"fedavg": _fedavg(2), "hyperfl": federation(HYPERFL, "loop", workers=2)}
    for run in runs.values():
        assert isinstance(run._engine, Processes)
        run._engine.patience = 0.0
    yield runs
    for run in runs.values():
        run.close()


def _fedavg(workers: int) -> Federation:
    data = [ClientData(worlds.images(n, "train"), worlds.images(4, "test", n)) for n in (3, 4, 5)]
    method = FedAvg(lr=0.1, momentum=0.5, batch_size=2)
    return Federation(Client(worlds.task(batch_norm=True), method), data, workers=workers)


def test_a_worker_computes_in_the_precision_of_the_process_that_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    given: list[tuple[Any, ...]] = []

    def pool(*_: object, initargs: tuple[Any, ...], **__: object) -> None:
        given.append(initargs)

    monkeypatch.setattr(workers, "ProcessPoolExecutor", pool)
    monkeypatch.setattr(workers.signal, "signal", lambda *_: None)
    monkeypatch.setattr(workers, "_exit_with_parent", lambda _: None)
    workers.Workers(2)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)  # as a process starts
    workers._initialize_worker(*given[0])
    assert not torch.backends.cudnn.allow_tf32


def test_processes_give_the_bits_of_the_loop(spread: dict[str, Federation]) -> None:
    alone = {"fedavg": _fedavg(1), "hyperfl": federation(HYPERFL, "loop")}
    for name, run in spread.items():
        assert isinstance(run._engine, Processes)
        for _ in range(2):
            done, expected = run.step(), alone[name].step()
            assert replace(done, seconds=0.0) == replace(expected, seconds=0.0)
            assert_same(run.server.shared, alone[name].server.shared)
            assert_same(run.server.buffers, alone[name].server.buffers)
            for mine, other in zip(run.clients, alone[name].clients, strict=True):
                assert_same(mine.private, other.private)
                assert_same(mine.buffers, other.buffers)


def test_workers_start_in_the_middle_of_a_round_when_patience_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    run, alone = _fedavg(2), _fedavg(1)
    assert isinstance(run._engine, Processes)
    assert run._engine.patience == workers.START_SECONDS
    here, train = list[int](), Engine.train

    def slowly(self: Engine, run: Federation, numbers: Sequence[int], **settings: Any) -> Iterable[Round]:
        time.sleep(0.3)
        here.extend(numbers)
        return train(self, run, numbers, **settings)

    monkeypatch.setattr(Engine, "train", slowly)
    run._engine.patience = 0.5
    run.step()
    monkeypatch.undo()
    alone.step()
    assert here == [0, 1]
    assert run._engine.pool is not None
    assert_same(run.server.shared, alone.server.shared)
    run.close()


def test_short_trainings_start_no_workers() -> None:
    run = _fedavg(2)
    run.step()
    assert isinstance(run._engine, Processes)
    assert run._engine.pool is None
    assert run._engine.patience < workers.START_SECONDS


def test_a_record_says_who_took_part_what_was_sent_and_how_well_it_does() -> None:
    run = federation(HYPERFL, "auto")
    before = run.record()
    assert (before.round, before.clients, before.accuracy_local, before.numbers_up) == (0, (), None, 0)
    assert before.accuracy == tuple(run.score(i) for i in range(3))
    run.client_fraction = 0.34
    after = run.step()
    assert len(after.clients) == 1
    assert after.round == 1
    assert len(after.accuracy_local or ()) == 1
    hypernetwork = sum(v.numel() for v in run.server.shared.values())
    assert (after.numbers_up, after.numbers_down) == (hypernetwork, hypernetwork)
    assert after.diagnostics == {"active_units": sum(_active(run, i) for i in range(3)) / 3}
    assert len(run.step(everyone=True).clients) == 3
    blind = run.step(evaluate=False)
    assert blind.accuracy is None
    assert blind.accuracy_local is None


def _active(run: Federation, number: int) -> int:
    params = {**run.server.shared, **run.clients[number].private}
    z = dense(params["hypernet.trunk.weight"]) @ dense(params["embedding"]) + dense(params["hypernet.trunk.bias"])
    return int((z > 0).sum())


def test_augmented_images_are_what_the_trace_holds() -> None:
    run = federation(HYPERFL, "auto")
    trace = run.train(2).trace
    original = run.data[2].train.inputs[trace.indices]
    assert trace.inputs.shape == original.shape
    assert not torch.equal(trace.inputs, original)
    view, truth = run.observe(2, augment=False)
    assert torch.equal(truth.inputs, run.data[2].train.inputs[truth.trace.indices])
    assert view.batch_size == 5


def test_little_goes_through_the_pipe_of_a_process_that_starts() -> None:
    """It holds 64 KiB, and a process that ends while it starts empties it never."""
    data = [ClientData(worlds.images(1, "train", n), worlds.images(1, "test", n)) for n in range(400)]
    packed = pack((Client(worlds.task(), HYPERFL), data))
    assert len(ForkingPickler.dumps(packed.value)) > 2**16
    handed = flatten(packed)
    assert len(ForkingPickler.dumps(replace(handed, blocks={}))) + 1000 * len(handed.blocks) < 2**13
    client, images = unpack(handed.opened())
    assert client.method == HYPERFL
    assert all(torch.equal(x.train.inputs, y.train.inputs) for x, y in zip(images, data, strict=True))


def test_every_process_that_starts_is_given_the_model() -> None:
    """Memory that torch hands over is given to whoever asks first."""
    handed, before = flatten(pack(worlds.task())), dict(worlds.task().model.state_dict())
    for _ in range(2):
        assert_same(dict(unpack(handed.opened()).model.state_dict()), before)


def test_packed_values_come_back_as_they_were() -> None:
    shared = torch.rand(4, 3)
    value = {
        "a": [shared, (torch.rand(2, 3, 5, 5).to(memory_format=torch.channels_last), 3)],
        "b": LowRank(shared, 0.5, (Term(2.0, shared[:, :1].mT, shared[0:1]),), (4, 3)),
        "c": (torch.arange(5), torch.zeros(0, 4), torch.tensor(True), None, "text"),
    }
    packed = pack(value)
    assert set(packed.blocks) == {torch.float32, torch.int64, torch.bool}
    back = unpack(packed)
    assert back["a"][0] is back["b"].base
    assert back["a"][1][0].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(back["a"][1][0], value["a"][1][0])  # type: ignore[index]
    assert torch.equal(back["b"].dense(), value["b"].dense())  # type: ignore[attr-defined]
    assert torch.equal(back["c"][0], torch.arange(5))
    assert back["c"][1].shape == (0, 4)
    assert back["c"][2:][1:] == (None, "text")
    assert all(t.data_ptr() % 64 == packed.blocks[t.dtype].data_ptr() % 64 for t in (back["a"][0], back["a"][1][0]))
