"""What of the machine is this process's to use: cores and memory, also inside a container."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from fl.workers import threads

EACH = 2 * 2**30
"""Bytes of memory that a worker process is taken to need: PyTorch, the images, a model's updates."""
GROUP, KERNEL = Path("/sys/fs/cgroup"), Path("/proc/meminfo")


def settle(asked: int | None, device: torch.device) -> int:
    """Processes to use, as asked or as many as do good; on a CPU this one gets a worker's number of threads.

    So the number of processes changes no bit of a result.
    """
    if device.type == "cpu":
        torch.set_num_threads(threads())
    return workers(device) if asked is None else asked


def workers(device: torch.device) -> int:
    """As many processes as there are cores and memory for; one on a GPU."""
    if device.type != "cpu":
        return 1
    free = memory()
    room = cores() if free is None else free // EACH
    return max(1, min(cores() // threads(), room))


def cores() -> int:
    """Those this process may run on, within its container's share of time."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(GROUP / "cpu.max").partition(" ")
    if quota.isdecimal() and period.isdecimal() and int(period):
        allowed = min(allowed, int(quota) // int(period))
    return max(allowed, 1)


def memory() -> int | None:
    """Bytes that are free, within the container's limit; None where nothing tells."""
    known = [line.split()[1] for line in _read(KERNEL).splitlines() if line.startswith("MemAvailable:")]
    free = [int(value) * 1024 for value in known]
    limit, used = _read(GROUP / "memory.max"), _read(GROUP / "memory.current")
    if limit.isdecimal() and used.isdecimal():
        free.append(max(int(limit) - int(used), 0))
    return min(free, default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # not this kind of system
        return ""
