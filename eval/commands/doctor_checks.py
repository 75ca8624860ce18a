"""What is installed and at hand, and what to do about what is not."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from importlib import metadata

from eval.run import resources
from eval.run.results import installed_version
from fl.runtime.workers import worker_thread_count

REQUIRED = ("torch", "torchvision", "numpy", "scipy", "scikit-image", "lpips", "opacus", "pydantic", "PyYAML")
FINE, ABSENT, FAULT = "ok", "absent", "fault"
"""States: nothing to do; something optional is not there; hyperleak can't work."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        what: it is.
        state: "ok", "absent" or "fault".
        found: there.
        remedy: what to do, or nothing.
    """

    what: str
    state: str
    found: str
    remedy: str = ""


def run_checks() -> list[Check]:
    """Check versions, device, data folder, data sets and LPIPS weights, in this order."""
    return [*_versions(), *_device(), _folder(), *_datasets(), _lpips()]


def _versions() -> list[Check]:
    found = [Check("hyperleak", FINE, metadata.version("hyperleak"))]
    fine = sys.version_info >= (3, 11)
    remedy = "" if fine else "make a new environment with Python 3.11 or newer"
    found.append(Check("Python", FINE if fine else FAULT, platform.python_version(), remedy))
    for package in REQUIRED:
        version = installed_version(package)
        remedy = "" if version else f"pip install {package}"
        found.append(Check(package, FINE if version else FAULT, version or "not installed", remedy))
    return found


def _device() -> list[Check]:
    import torch

    number, each = resources.default_workers(torch.device("cpu")), worker_thread_count()
    found = [
        Check(
            "processes", FINE, f"{number} of {each} thread(s); {resources.available_cores()} of {os.cpu_count()} cores"
        )
    ]
    if torch.cuda.is_available():
        return [*found, Check("GPU", FINE, torch.cuda.get_device_name())]
    reason = "this torch is built without CUDA" if torch.version.cuda is None else "no driver or no device"
    remedy = "not needed; for long runs install a CUDA build of torch on a machine that has one"
    return [*found, Check("GPU", ABSENT, reason, remedy)]


def _folder() -> Check:
    from fl.data.sources import npz_files

    place = npz_files.data_folder()
    remedy = f"set {npz_files.DATA_VARIABLE} to a folder of .npz files, or let --download make this one"
    try:
        if place.is_dir():
            return Check("data folder", FINE, str(place))
    except OSError as error:
        return Check("data folder", ABSENT, f"{place}: {error.strerror}", remedy)
    return Check("data folder", ABSENT, f"{place} does not exist", remedy)


def _datasets() -> list[Check]:
    from fl.data.sources.benchmark_sets import available_sets, download_hint

    found = [Check(f"data set {name}", FINE, "inside scikit-image") for name in ("faces", "photos")]
    for name, path in available_sets().items():
        words = "in the data folder" if path else "not in the data folder"
        missing = "" if path else download_hint(name) or "copy its two files into the data folder"
        found.append(Check(f"data set {name}", FINE if path else ABSENT, words, missing))
    return found


def _lpips() -> Check:
    from eval.metrics.perceptual import Unavailable, load_lpips

    try:
        found = load_lpips()
    except (ValueError, FileNotFoundError) as error:
        return Check("LPIPS weights", ABSENT, str(error), "unset HYPERLEAK_LPIPS or give another file")
    if isinstance(found, Unavailable):
        return Check("LPIPS weights", ABSENT, found.reason, f"{found.remedy}; a run with a network gets it")
    return Check("LPIPS weights", FINE, found.net)
