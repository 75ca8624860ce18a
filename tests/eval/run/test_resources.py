"""How many processes are used where nobody says."""

from pathlib import Path

import pytest
import torch

from eval.run import resources
from fl.runtime import workers

GIB = 2**30


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of eight cores whose kernel says nothing yet."""
    monkeypatch.setattr(resources, "GROUP", tmp_path)
    monkeypatch.setattr(resources, "KERNEL", tmp_path / "meminfo")
    monkeypatch.setattr(resources.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return tmp_path


CPU = torch.device("cpu")


def test_a_worker_for_every_core(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resources.default_workers(CPU) == 8
    assert resources.default_workers(torch.device("cuda")) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert resources.default_workers(CPU) == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "12")
    assert resources.default_workers(CPU) == 1


@pytest.mark.parametrize(
    ("quota", "found"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8)]
)
def test_a_container_has_its_share_of_cores(files: Path, quota: str, found: int) -> None:
    (files / "cpu.max").write_text(quota + "\n")
    assert resources.available_cores() == found


def test_containers_of_the_older_kind_count_as_well(files: Path) -> None:
    for name in ("cpu", "memory"):
        (files / name).mkdir()
    (files / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (files / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert resources.available_cores() == 8
    (files / "cpu" / "cpu.cfs_quota_us").write_text("300000\n")
    assert resources.available_cores() == 3
    (files / "memory" / "memory.limit_in_bytes").write_text(f"{6 * GIB}\n")
    (files / "memory" / "memory.usage_in_bytes").write_text(f"{5 * GIB}\n")
    assert resources.available_memory() == GIB
    (files / "memory" / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {4 * GIB}\n")
    assert resources.available_memory() == 5 * GIB


def test_files_that_were_read_do_not_count_as_used(files: Path) -> None:
    (files / "memory.max").write_text(f"{32 * GIB}\n")
    (files / "memory.current").write_text(f"{31 * GIB}\n")
    assert resources.default_workers(CPU) == 1
    (files / "memory.stat").write_text(f"anon {GIB}\ninactive_file {30 * GIB}\n")
    assert resources.default_workers(CPU) == 8


def test_memory_limits_workers(files: Path) -> None:
    assert resources.available_memory() is None
    (files / "meminfo").write_text("MemTotal: 1 kB\nMemAvailable:   10485760 kB\n")
    assert resources.available_memory() == 10 * GIB
    assert resources.default_workers(CPU) == 5
    (files / "memory.max").write_text("max\n")
    (files / "memory.current").write_text(f"{GIB}\n")
    assert resources.default_workers(CPU) == 5
    (files / "memory.max").write_text(f"{7 * GIB}\n")
    assert resources.default_workers(CPU) == 3
    (files / "memory.max").write_text(f"{GIB // 2}\n")
    assert resources.default_workers(CPU) == 1


def test_processes_round_alike_whatever_their_number(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    assert resources.choose_workers(None, CPU) == 8
    assert resources.choose_workers(3, CPU) == 3
    assert resources.choose_workers(3, torch.device("cuda")) == 3
    assert set_to == [1, 1]


@pytest.mark.parametrize(("told", "found"), [("", 1), ("4", 4), ("4,2", 4), ("0", 1), ("many", 1)])
def test_threads_are_one_or_as_the_environment_says(told: str, found: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", told)
    assert workers.worker_thread_count() == found
