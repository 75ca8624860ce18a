from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import matrix, worlds
from support.compare import assert_same, tensors

from fl.client import Client
from fl.federation import ClientData, Federation
from fl.methods.fedavg import FedAvg
from fl.simulation import checkpoint
from fl.tensors import dense


def fresh(row: str, **settings: int) -> Federation:
    probe = matrix.ROWS[row]
    return worlds.federation(probe.method, probe.defense, probe.task, rounds=0, **settings)


@pytest.mark.parametrize("row", matrix.ROWS)
def test_a_run_read_back_goes_on_bit_for_bit(row: str, tmp_path: Path) -> None:
    whole, stopped = fresh(row), fresh(row)
    for run in (whole, stopped):
        run.run_round()
        run.run_round()
    checkpoint.save(tmp_path / "a.npz", stopped)
    again = fresh(row)
    checkpoint.load(tmp_path / "a.npz", again)
    assert again.server.round == 2
    assert list(again.server.shared) == list(whole.server.shared)
    for run in (whole, again):
        run.run_round()
    assert again.accuracy() == whole.accuracy()
    assert_same(again.server.shared, whole.server.shared)
    assert_same(again.server.buffers, whole.server.buffers)
    for mine, other in zip(again.clients, whole.clients, strict=True):
        assert_same(mine.private, other.private)
        for ours, theirs in zip(tensors(mine.memory), tensors(other.memory), strict=True):
            assert torch.equal(ours, theirs)


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    run = fresh("fedavg")
    path = tmp_path / "a.npz"
    checkpoint.save(path, run)
    whole = path.read_bytes()
    target = fresh("fedavg")
    before = dict(target.server.shared)
    payload = whole.index(run.server.shared["head.weight"].numpy().tobytes())  # type: ignore[union-attr]
    for place in (payload, payload + 9, len(whole) // 2, len(whole) - 5):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"expected a whole checkpoint"):
            checkpoint.load(path, target)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"expected a whole checkpoint"):
        checkpoint.load(path, target)
    assert_same(target.server.shared, before)


def test_a_checkpoint_of_another_federation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    checkpoint.save(path, fresh("fedavg"))
    with pytest.raises(ValueError, match=r"seed 1, got one of seed 0"):
        checkpoint.load(path, fresh("fedavg", seed=1))
    with pytest.raises(ValueError, match=r"of another model, method or number of clients"):
        checkpoint.load(path, fresh("fedper"))
    data = ClientData(worlds.images(4, "train", 0), worlds.images(4, "test", 0))
    with pytest.raises(ValueError, match=r"number of clients"):
        checkpoint.load(path, Federation(Client(worlds.task(batch_norm=True), FedAvg.example()), [data]))
    with pytest.raises(FileNotFoundError):
        checkpoint.load(tmp_path / "b.npz", fresh("fedavg"))


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, run = tmp_path / "a.npz", fresh("fedavg")
    checkpoint.save(path, run)
    before = path.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="no space"):
        checkpoint.save(path, run)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.npz"]


class Remembers(FedAvg):
    """Keeps a payload in another layout, and an empty one."""

    def init_memory(self, params: Any, task: Any) -> Any:
        return {"last": {}, "empty": {}}

    def finish(self, params: Any, step: Any, steps: int) -> Any:
        turned = {k: dense(v).mT.contiguous().mT if dense(v).ndim > 1 else dense(v) for k, v in params.items()}
        return {}, {"last": turned, "empty": step.memory["empty"]}


def test_empty_payloads_and_layouts_survive(tmp_path: Path) -> None:
    run, again = (worlds.federation(Remembers(lr=0.1), rounds=n) for n in (1, 0))
    checkpoint.save(tmp_path / "a.npz", run)
    checkpoint.load(tmp_path / "a.npz", again)
    for mine, other in zip(again.clients, run.clients, strict=True):
        assert list(mine.memory) == list(other.memory) == ["last", "empty"]
        assert all(v.is_contiguous() for v in tensors([mine.memory, other.memory]))
    again.run_round()


def test_another_type_of_numbers_is_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a.npz", fresh("fedavg"))
    single = Federation(Client(worlds.task().to(dtype=torch.float32), FedAvg.example()), fresh("fedavg").data)
    with pytest.raises(ValueError, match=r"float32 .*got float64"):
        checkpoint.load(tmp_path / "a.npz", single)
