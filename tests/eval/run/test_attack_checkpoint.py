"""An attack that is stopped goes on after the portions it finished, and leaves the bytes of one that was not."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from support import worlds
from support.runs import run, tiny
from support.tiny import Guess, Registered
from torch import Tensor

from attacks.base import NotApplicable, Reconstruction, Remark
from eval.run import attack_cell, attack_checkpoint
from eval.run.attack_checkpoint import AttackCheckpoint
from fl.methods.hyperfl import HyperFL
from fl.tensors import LowRank, Term, dense
from fl.view import ServerView

WORDS = (
    "attack=guess",
    "observe.method={steps: 1}",
    "observe.images=6",
    "observe.batch_size=1",
    "method=[{name: fedavg, lr: 0.1, batch_size: 6}]",
)


def whole() -> Reconstruction:
    """A result with a value in every field."""
    return Reconstruction(
        inputs=torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
        labels=torch.tensor([3, 1]),
        objective=0.1 + 0.2,
        history=(1.0, math.inf, 1 / 3),
        private={
            "embedding": torch.tensor([1.5, -2.0]),
            "extractor/a/weight": LowRank(
                None, 0.0, (Term(2.0, torch.ones(1, 3), torch.ones(1, 2)),), torch.Size([3, 2])
            ),
        },
        knowledge=("labels", "defense"),
        verified=False,
        note="as far as the second layer",
        given_up="it stopped at 10 iterations",
        cut_short="after 10 of 20 iterations",
        misfit=0.25,
        relative_error=0.125,
        approximate=True,
        remarks=frozenset({Remark.PARTLY_SEEN, Remark.LABELS_CONFIRMED}),
        fixed=torch.tensor([True, False]).view(2, 1, 1, 1).expand(2, 3, 4, 4),
        seen=torch.tensor([False, True]).view(2, 1, 1, 1).expand(2, 3, 4, 4),
    )


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attack_checkpoint, "MIN_SECONDS_BETWEEN_WRITES", 0.0)


def views(count: int) -> list[ServerView]:
    """Of one step on one image each."""
    seen = worlds.federation(worlds.one_step(HyperFL.example()), rounds=0)
    return [seen.observe(0, data=worlds.images(1, "victim", i))[0] for i in range(count)]


def test_results_come_back_as_they_were(tmp_path: Path) -> None:
    kept, given = AttackCheckpoint(tmp_path / "found", views(5)), whole()
    assert kept.load() == {}
    kept.save([4, 2], [given, NotApplicable("not in the mood", limit=True)])
    kept.save([0], [Reconstruction(inputs=None)])
    back = kept.load()
    assert set(back) == {0, 2, 4}
    assert back[2] == NotApplicable("not in the mood", limit=True)
    assert isinstance(back[0], Reconstruction)
    assert back[0].inputs is None
    assert math.isnan(back[0].objective)
    again = back[4]
    assert isinstance(again, Reconstruction)
    empty = Reconstruction(inputs=None)
    for field in fields(Reconstruction):
        assert repr(getattr(given, field.name)) != repr(getattr(empty, field.name)), f"give {field.name} a value"
        mine, was = getattr(again, field.name), getattr(given, field.name)
        if isinstance(was, Tensor):
            assert mine.dtype == was.dtype
            assert torch.equal(mine, was)
        elif field.name == "private":
            assert mine.keys() == was.keys()
            assert all(torch.equal(dense(mine[name]), dense(was[name])) for name in was)
        else:
            assert mine == was, field.name


def test_what_is_damaged_or_of_other_code_or_updates_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = views(3)
    kept = AttackCheckpoint(tmp_path, given)
    for i in range(3):
        kept.save([i], [whole()])
    path = tmp_path / "00001.npz"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert set(kept.load()) == {0, 2}
    assert set(AttackCheckpoint(tmp_path, given[:1]).load()) == {0}
    assert set(AttackCheckpoint(tmp_path, [given[1], given[1], given[2]]).load()) == {2}
    monkeypatch.setattr(attack_checkpoint, "source_digest", lambda: "another")
    assert kept.load() == {}


def test_what_takes_no_time_is_not_kept_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(attack_checkpoint, "MIN_SECONDS_BETWEEN_WRITES", 1.0)
    monkeypatch.setattr(attack_checkpoint.time, "monotonic", lambda: now[0])
    kept = AttackCheckpoint(tmp_path, views(4))
    for i, now[0] in enumerate((0.4, 0.8, 1.2, 1.6)):
        kept.save([i], [whole()])
    assert [path.name for path in tmp_path.iterdir()] == ["00000.npz"]
    assert set(kept.load()) == {0, 1, 2}


def test_a_full_disk_does_not_end_the_attack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    kept = AttackCheckpoint(tmp_path, views(2))
    with monkeypatch.context() as patched:
        patched.setattr(attack_checkpoint.np, "savez", full)
        kept.save([0], [whole()])
    assert "no space left" in caplog.text
    kept.save([1], [whole()])
    assert set(kept.load()) == {0, 1}


def test_nothing_is_lost_between_the_last_portion_and_the_finished_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    attacked: list[int] = []
    guess = Guess.attack_view

    def attack_view(self: Guess, view: ServerView, seed: int) -> object:
        attacked.append(seed)
        return guess(self, view, seed)

    with Registered():
        monkeypatch.setattr(Guess, "attack_view", attack_view)
        with monkeypatch.context() as patched:
            patched.setattr(attack_cell.np, "savez_compressed", stop)
            with pytest.raises(KeyboardInterrupt):
                run(tiny(*WORDS), tmp_path / "a", keep_checkpoints=True)
        assert len(attacked) == 6
        run(tiny(*WORDS), tmp_path / "a")
    assert len(attacked) == 6
    assert not list(tmp_path.rglob("found"))


def test_a_stopped_attack_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attacked: list[int] = []
    guess = Guess.attack_view

    def attack_view(self: Guess, view: object, seed: int) -> object:
        attacked.append(seed)
        if len(attacked) == 4:
            raise KeyboardInterrupt
        return guess(self, view, seed)  # type: ignore[arg-type]

    with Registered():
        monkeypatch.setattr(Guess, "attack_view", attack_view)
        with pytest.raises(KeyboardInterrupt):
            run(tiny(*WORDS), tmp_path / "a", keep_checkpoints=True)
        counts: list[tuple[str, int]] = []
        again = run(tiny(*WORDS), tmp_path / "a", progress=lambda stage, done, _: counts.append((stage, done)))
        assert len(attacked) == 4 + 3
        assert len(set(attacked)) == 6  # the fourth had to be begun again
        assert [done for stage, done in counts if stage == "fedavg: guess"][-4:] == [3, 4, 5, 6]
        assert again == run(tiny(*WORDS), tmp_path / "b")
    a, b = tmp_path / "a", tmp_path / "b"
    assert (a / "images.jsonl").read_bytes() == (b / "images.jsonl").read_bytes()
    assert sorted(p.name for p in (a / "cells").glob("*/*")) == sorted(p.name for p in (b / "cells").glob("*/*"))
    assert not list(a.rglob("found"))


def test_pictures_in_bfloat16_are_kept_in_the_next_type_that_numpy_has(tmp_path: Path) -> None:
    kept = AttackCheckpoint(tmp_path, views(1))
    found = replace(whole(), inputs=torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)).bfloat16())
    kept.save([0], [found])
    assert torch.equal(kept.load()[0].inputs, found.inputs.float())
