"""LPIPS v0.1 (Zhang et al., CVPR 2018) with a backbone whose weights are known, or a reason why there is none.

The `lpips` package ships the linear heads; the ImageNet backbone comes from a file, from torchvision's cache
(`$TORCH_HOME/hub/checkpoints`), from the data folder (`weights/`) or, where that is allowed, from torchvision's server.
Its SHA-256 is checked every time. Values from a random backbone look like LPIPS and mean nothing, so there is no such
fallback.
"""

from __future__ import annotations

import hashlib
import logging
import os
import warnings
from dataclasses import dataclass
from functools import cache
from http.client import HTTPException
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol
from urllib.request import urlopen

import numpy as np
import torch
from torch import Tensor, nn
from torch.backends import cudnn
from torch.nn.functional import interpolate

from eval.metrics.image import prepare
from fl.data.sources.npz_files import data_folder
from fl.registry import UnknownNameError
from fl.runtime.atomic_files import atomic_write
from fl.runtime.safe_paths import is_accessible_file

if TYPE_CHECKING:
    from collections.abc import Mapping

ENVIRONMENT = "HYPERLEAK_LPIPS"
"""Environment variable that names a backbone file."""

OFFLINE = "HYPERLEAK_OFFLINE"
"""Environment variable that forbids every download, where it is set to anything but 0."""

CHECKPOINTS = {
    "alex": "alexnet-owt-7be5be79.pth",
    "squeeze": "squeezenet1_1-b8a52dc0.pth",
    "vgg": "vgg16-397923af.pth",
}
"""torchvision's file of each backbone; the hexadecimal digits are the first of the file's SHA-256."""

ARRAY_FILES = {"ec921224c58e6acf468f09e4ebffd2515b4a7cedfcca2856fa29f0cc1aad118d": "squeeze"}
"""SHA-256 of `.npz` files of plain arrays under torchvision's names, and whose backbone each is."""

DATA_FILES = {"squeeze": "squeezenet1_1_imagenet_fp16.npz"}
"""Files of plain arrays that may lie in the data folder under `weights/`, by the backbone they hold."""

log = logging.getLogger(__name__)
_URL = "https://download.pytorch.org/models/"
_SECONDS = 5.0
"""Within which a server has to answer; of a download that has begun, between two pieces."""
_PIECE = 2**20
_SMALLEST, _RESIZED = 32, 64
_BATCH = 32
_TAKEN_UNASKED = ("alex", "squeeze")
"""Backbones that are taken where none is asked for, in this order; VGG's takes many times as long."""


class Perceptual(Protocol):
    """A perceptual measure, or the reason why it cannot be taken."""

    @property
    def missing(self) -> str | None:
        """Why there is no value and what helps, or None."""

    def name(self, height: int, width: int) -> str:
        """Return what the measure is called for images of this size."""

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the distance of each pair of images (N,)."""


@dataclass(frozen=True)
class Unavailable:
    """LPIPS that cannot be computed.

    Attributes:
        net: the backbone asked for.
        reason: what is missing.
        remedy: what to do about it.
    """

    net: str
    reason: str
    remedy: str

    @property
    def missing(self) -> str:
        """Reason and remedy in one sentence."""
        return f"LPIPS not available: {self.reason}; {self.remedy}"

    def name(self, height: int, width: int) -> str:
        """Return the name the measure would have had."""
        return _name(self.net, height, width)

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """Return NaN for each image: there is no value.

        Raises:
            ValueError: as `eval.metrics.image.prepare`.
        """
        return torch.full((len(prepare(a, b)[0]),), torch.nan, dtype=torch.float64)


@dataclass(frozen=True)
class Lpips:
    """LPIPS v0.1 with checked weights.

    Attributes:
        net: "alex", "squeeze" or "vgg".
        model: the network of the `lpips` package, in evaluation mode.
    """

    net: str
    model: nn.Module
    missing: None = None

    def name(self, height: int, width: int) -> str:
        """Backbone and resizing, e.g. `lpips_squeeze` or `lpips_alex@64`."""
        return _name(self.net, height, width)

    @torch.no_grad()
    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the distance of each pair of images; 0 for equal ones, larger is farther.

        Pixels are mapped from [0, 1] to [-1, 1], gray images repeated to three channels, and images with a side below
        32 pixels resized to 64x64 bilinearly (AlexNet needs 31 pixels).

        Args:
            a: reconstructions (N, C, H, W) with 1 or 3 channels, clamped to [0, 1].
            b: true images of the same shape in [0, 1].

        Returns:
            (N,) float64, on the CPU; computed where the true images are.

        Raises:
            ValueError: as `eval.metrics.image.prepare`, or for other numbers of channels.
        """
        pairs = [_network_input(images) for images in prepare(a, b)]
        model = self.model.to(b.device)
        with cudnn.flags(enabled=cudnn.enabled, allow_tf32=False):  # ten bits of a GPU's convolutions are too few
            parts = [model(x, y).flatten() for x, y in zip(*(torch.split(p, _BATCH) for p in pairs), strict=True)]
        return torch.cat(parts).double().cpu()


def load_lpips(
    net: str | None = None, file: str | Path | None = None, *, allow_download: bool = False
) -> Lpips | Unavailable:
    """Load LPIPS with weights from `file`, else `$HYPERLEAK_LPIPS`, else those at hand, else downloaded.

    At hand are torchvision's cache and `weights/` in the data folder, in this order.

    Args:
        net: "alex", "squeeze" or "vgg"; None takes the file's where one is named, else AlexNet or SqueezeNet, whichever
            is at hand, else AlexNet.
        file: torchvision's checkpoint, or an `.npz` listed in `ARRAY_FILES`.
        allow_download: fetch torchvision's checkpoint into its cache if there is none, unless `$HYPERLEAK_OFFLINE` is
            set. A line in the log says so; where there is no network it takes five seconds, and once a process.

    Returns:
        The measure, or `Unavailable` with reason and remedy where no file is named and none found.

    Raises:
        ValueError: the named file is not a known backbone or belongs to another one.
        UnknownNameError: unknown `net`.
        FileNotFoundError: the named file does not exist.
    """
    if net is not None and net not in CHECKPOINTS:
        raise UnknownNameError("LPIPS net", net, CHECKPOINTS)
    named = file if file is not None else os.environ.get(ENVIRONMENT)
    if named:
        path = Path(named)
        if not path.is_file():
            raise FileNotFoundError(f"LPIPS backbone {path} does not exist; give another file or unset {ENVIRONMENT}")
        owner = _identify(path)
        if owner is None:
            known = ", ".join(CHECKPOINTS.values())
            raise ValueError(f"the SHA-256 of {path} is that of no known backbone; expected torchvision's {known}")
        if net not in (None, owner):
            raise ValueError(f"expected a backbone for net {net!r}, got {path}, which is one for {owner!r}")
        return Lpips(owner, _build(owner, _read(path)))
    return _find(net, allow_download and os.environ.get(OFFLINE, "0") in {"", "0"})


def _find(net: str | None, allow_download: bool) -> Lpips | Unavailable:
    """Return LPIPS with the first backbone that is at hand, or the one asked for downloaded."""
    damaged = None
    for owner in _TAKEN_UNASKED if net is None else (net,):
        for path in _places(owner):
            if not is_accessible_file(path):
                continue
            if _identify(path) == owner:
                return Lpips(owner, _build(owner, _read(path)))
            expected = f" (its SHA-256 does not begin {_prefix(path.name)})" if path.suffix == ".pth" else ""
            damaged = damaged or Unavailable(owner, f"{path.name} is damaged{expected}", _remedy(owner))
    wanted = net or "alex"
    cached, *_ = _places(wanted)
    if damaged is None and allow_download and _download(wanted, cached):
        return Lpips(wanted, _build(wanted, _read(cached)))
    # the same words whether a download was tried or not: rows quote them, and are the same on every machine
    return damaged or Unavailable(wanted, f"no {cached.name} found", _remedy(wanted))


def _places(net: str) -> list[Path]:
    """Return where a backbone's file may be at hand: torchvision's cache, then the data folder."""
    cached = Path(torch.hub.get_dir()) / "checkpoints" / CHECKPOINTS[net]
    return [cached, *([data_folder() / "weights" / DATA_FILES[net]] if net in DATA_FILES else [])]


def _remedy(net: str) -> str:
    # results quote this: the variable, not this machine's folder
    return f"put {CHECKPOINTS[net]} into $TORCH_HOME/hub/checkpoints (~/.cache/torch by default), or set {ENVIRONMENT}"


@cache
def _download(net: str, path: Path) -> bool:
    """Fetch a checkpoint; return whether it is there now. What failed is not tried again in this process."""
    try:
        with _open(_URL + path.name) as answer:
            log.warning(
                "fetching %s for LPIPS from %s (%s MB, once; --offline, %s=1 or score.download=false forbids it)",
                *(path.name, _URL, round(int(answer.headers.get("Content-Length") or 0) / 1e6) or "?", OFFLINE),
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            digest = hashlib.sha256()
            with atomic_write(path) as file:
                while piece := answer.read(_PIECE):
                    digest.update(piece)
                    file.write(piece)
                if not digest.hexdigest().startswith(_prefix(path.name)):
                    raise ValueError("what came has another SHA-256")
    except (OSError, ValueError, HTTPException) as error:
        log.warning("%s for LPIPS could not be downloaded (%s); %s", path.name, error, _remedy(net))
        return False
    return True


def _open(address: str) -> Any:
    """Open an address, or give up after `_SECONDS`: the time limit of `urlopen` is that of each of a server's hosts."""
    answers: SimpleQueue[Any] = SimpleQueue()

    def ask() -> None:
        try:
            answers.put(urlopen(address, timeout=_SECONDS))
        except (OSError, ValueError, HTTPException) as error:
            answers.put(error)

    Thread(target=ask, daemon=True).start()
    try:
        found = answers.get(timeout=_SECONDS)
    except Empty:
        raise TimeoutError(f"no answer within {_SECONDS:g} s") from None
    if isinstance(found, Exception):
        raise found
    return found


def _prefix(checkpoint: str) -> str:
    return checkpoint.removesuffix(".pth").rpartition("-")[2]


def _identify(path: Path) -> str | None:
    """Return whose backbone a file holds, by its SHA-256."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    by_prefix = (net for net, name in CHECKPOINTS.items() if digest.startswith(_prefix(name)))
    return ARRAY_FILES.get(digest) or next(by_prefix, None)


def _read(path: Path) -> Mapping[str, Tensor]:
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            return {name: torch.from_numpy(arrays[name].astype(np.float32)) for name in arrays.files}
    state: Mapping[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def _build(net: str, backbone: Mapping[str, Tensor]) -> nn.Module:
    """Return the `lpips` network with its own linear heads and the given backbone; nothing in it stays random."""
    import lpips  # brings torchvision, so only where LPIPS is wanted

    heads_file = Path(lpips.__file__).parent / "weights" / "v0.1" / f"{net}.pth"
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):  # building draws weights, all replaced below
        warnings.filterwarnings("ignore", category=UserWarning, module="torchvision")
        model: nn.Module = lpips.LPIPS(net=net, pretrained=False, pnet_rand=True, verbose=False)
    state = dict(torch.load(heads_file, map_location="cpu", weights_only=True))
    for name in model.state_dict():
        part, _, layer = name.partition(".slice")  # lpips: net.slice2.3.weight, torchvision: features.3.weight
        if part == "net":
            source = f"features.{layer.partition('.')[2]}"
            if source not in backbone:
                raise ValueError(f"expected a backbone for {net!r} with {source!r}, got {len(backbone)} other tensors")
            state[name] = backbone[source]
    outcome = model.load_state_dict(state, strict=False)
    # `lins` repeats the heads under a second name, `scaling_layer` holds constants
    random = [name for name in outcome.missing_keys if not name.startswith(("lins.", "scaling_layer."))]
    if random or outcome.unexpected_keys:
        raise ValueError(f"LPIPS weights for {net!r} lack {random} and have {outcome.unexpected_keys} too many")
    return model.eval().requires_grad_(False)


def _network_input(images: Tensor) -> Tensor:
    if images.shape[1] not in (1, 3):
        raise ValueError(f"expected 1 or 3 channels for LPIPS, got {images.shape[1]}")
    pixels = images.float().expand(-1, 3, -1, -1) * 2 - 1
    if min(pixels.shape[2:]) < _SMALLEST:
        pixels = interpolate(pixels, size=(_RESIZED, _RESIZED), mode="bilinear", align_corners=False)
    return pixels


def _name(net: str, height: int, width: int) -> str:
    return f"lpips_{net}@{_RESIZED}" if min(height, width) < _SMALLEST else f"lpips_{net}"
