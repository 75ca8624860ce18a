"""What of the machine is this process's to use: cores and memory, also inside a container."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from fl.runtime.workers import worker_thread_count

BYTES_PER_WORKER = 2 * 2**30
"""Bytes of memory that a worker process is taken to need: PyTorch, the images, a model's updates."""
GROUP, KERNEL = Path("/sys/fs/cgroup"), Path("/proc/meminfo")


def choose_workers(asked: int | None, device: torch.device) -> int:
    """Choose how many processes to use, as asked or as many as do good; on a CPU, set this one's threads, too.

    So the number of processes changes no bit of a result.
    """
    if device.type == "cpu":
        torch.set_num_threads(worker_thread_count())
    return default_workers(device) if asked is None else asked


def default_workers(device: torch.device) -> int:
    """Return as many processes as there are cores and memory for; one on a GPU."""
    if device.type != "cpu":
        return 1
    free = available_memory()
    room = available_cores() if free is None else free // BYTES_PER_WORKER
    return max(1, min(available_cores() // worker_thread_count(), room))


def available_cores() -> int:
    """Return how many cores this process may run on, within its container's share of time."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(GROUP / "cpu.max").partition(" ")
    if not quota:  # the older kind of control groups
        quota, period = (_read(GROUP / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    if quota.isdecimal() and period.isdecimal() and int(period):
        allowed = min(allowed, int(quota) // int(period))
    return max(allowed, 1)


def available_memory() -> int | None:
    """Return bytes that are free or hold files that were read, within the container's limit; None if unknown."""
    known = [line.split()[1] for line in _read(KERNEL).splitlines() if line.startswith("MemAvailable:")]
    free = [int(value) * 1024 for value in known]
    for place, names in ((GROUP, ("max", "current")), (GROUP / "memory", ("limit_in_bytes", "usage_in_bytes"))):
        limit, used = (_read(place / f"memory.{name}") for name in names)
        if limit.isdecimal() and used.isdecimal():
            stat = dict(line.split() for line in _read(place / "memory.stat").splitlines() if len(line.split()) == 2)
            files = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
            free.append(max(int(limit) - int(used) + files, 0))
    return min(free, default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # not this kind of system
        return ""
