"""LPIPS v0.1 (Zhang et al., CVPR 2018) with a backbone whose weights are known, or a reason why there is none.

The `lpips` package ships the linear heads; the ImageNet backbone comes from a file, from torchvision's cache
(`$TORCH_HOME/hub/checkpoints`) or, on request, from torchvision's server. Its SHA-256 is checked every time. Values
from a random backbone look like LPIPS and mean nothing, so there is no such fallback.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.backends import cudnn
from torch.nn.functional import interpolate

from eval.metrics.image import prepare
from fl.registry import UnknownNameError
from fl.runtime.safe_paths import is_accessible_file

if TYPE_CHECKING:
    from collections.abc import Mapping

ENVIRONMENT = "HYPERLEAK_LPIPS"
"""Environment variable that names a backbone file."""

CHECKPOINTS = {
    "alex": "alexnet-owt-7be5be79.pth",
    "squeeze": "squeezenet1_1-b8a52dc0.pth",
    "vgg": "vgg16-397923af.pth",
}
"""torchvision's file of each backbone; the hexadecimal digits are the first of the file's SHA-256."""

ARRAY_FILES = {"ec921224c58e6acf468f09e4ebffd2515b4a7cedfcca2856fa29f0cc1aad118d": "squeeze"}
"""SHA-256 of `.npz` files of plain arrays under torchvision's names, and whose backbone each is."""

_URL = "https://download.pytorch.org/models/"
_SMALLEST, _RESIZED = 32, 64
_BATCH = 32


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
    """Load LPIPS with weights from `file`, else `$HYPERLEAK_LPIPS`, else torchvision's cache, else downloaded.

    Args:
        net: "alex", "squeeze" or "vgg"; None takes the file's, or AlexNet where no file is named.
        file: torchvision's checkpoint, or an `.npz` listed in `ARRAY_FILES`.
        allow_download: fetch torchvision's checkpoint into its cache if there is none.

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
    return _from_cache(net or "alex", allow_download)


def _from_cache(net: str, allow_download: bool) -> Lpips | Unavailable:
    path = Path(torch.hub.get_dir()) / "checkpoints" / CHECKPOINTS[net]
    # results quote this: the variable, not this machine's folder
    remedy = f"put {path.name} into $TORCH_HOME/hub/checkpoints (~/.cache/torch by default), or set {ENVIRONMENT}"
    if not is_accessible_file(path):
        if not allow_download:
            return Unavailable(net, f"no {path.name} found", remedy)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(_URL + path.name, str(path), _prefix(path.name), progress=False)
        except (OSError, RuntimeError) as error:  # no network; RuntimeError is torch's for a wrong hash
            return Unavailable(net, f"{path.name} could not be downloaded ({error})", remedy)
    if _identify(path) != net:
        return Unavailable(net, f"{path.name} is damaged (its SHA-256 does not begin {_prefix(path.name)})", remedy)
    return Lpips(net, _build(net, _read(path)))


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
