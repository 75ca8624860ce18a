"""What a data exchange object (DXO) of NVFlare carries, as tensors and back. Nothing here needs NVFlare.

NumPy arrays and PyTorch tensors come both; what goes back is of the kind and type that came.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eval.federations.reply_checks import Beside, UnreadableError

STEPS = "NUM_STEPS_CURRENT_ROUND"
"""The key of a DXO's meta by which NVFlare's aggregators weigh an update (`MetaKey.NUM_STEPS_CURRENT_ROUND`)."""
NEXT_TO_NOTHING = 2.0**-20
"""Steps for which withheld updates count. A power of two, so that weighing by it rounds nothing."""
FLOAT32_EPSILON = torch.finfo(torch.float32).eps
PLAIN = (str, bool, int, float, np.bool_, np.integer, np.floating)
"""What a DXO's meta may hold beside containers of the same."""


@dataclass(frozen=True)
class Received:
    """What a site was sent with a task.

    Attributes:
        weights: copies of the weights by name, on the CPU.
        round: number of the round; None where the task says none.
    """

    weights: dict[str, Tensor]
    round: int | None


class ReceivedWeights:
    """Remembers what each site was sent last. Training in place does not change it."""

    def __init__(self) -> None:
        self._by_site: dict[str, tuple[str, Received]] = {}
        self._sources: dict[str, object] = {}
        self._copied = Received({}, None)

    def remember(self, site: str, task: str, data: Mapping[str, object], round: int | None) -> None:
        """Keep what a site was sent with a task. One copy serves all sites that were sent the same arrays in a round.

        Raises:
            UnreadableError: it is no set of named arrays; what the site was sent before is forgotten all the same.
        """
        self._by_site.pop(site, None)
        known = self._sources
        same = known.keys() == data.keys() and all(known[name] is data[name] for name in known)
        if round is None or round != self._copied.round or not same:
            self._copied = Received(read_tensors(data), round)
            self._sources = dict(data)
        self._by_site[site] = (task, self._copied)

    def take(self, site: str, task: str) -> Received | None:
        """Return what the site was sent with this very task and forget it; None where that is not known."""
        if site not in self._by_site or self._by_site[site][0] != task:
            return None
        return self._by_site.pop(site)[1]


def read_tensors(data: Mapping[str, object]) -> dict[str, Tensor]:
    """Return copies on the CPU of named NumPy arrays, PyTorch tensors, numbers or nested lists of numbers.

    Tensors that NVFlare left on the disk (`enable_tensor_disk_offload`) are loaded.

    Raises:
        UnreadableError: an entry is something else, such as a reference that another process is to download.
    """
    return {str(name): _read_tensor(str(name), value) for name, value in data.items()}


def _read_tensor(name: str, value: object) -> Tensor:
    load = getattr(value, "materialize", None)
    found = load() if callable(load) else value
    if isinstance(found, Tensor):
        return found.detach().cpu().clone()
    try:
        array = np.asarray(found)
        if array.dtype.kind not in "biuf":
            raise TypeError(f"numbers of type {array.dtype}")
        return torch.tensor(array)
    except (TypeError, ValueError) as error:
        raise UnreadableError(f"expected an array under {name!r}, got {type(value).__name__}") from error


def write_like(tensors: Mapping[str, Tensor], patterns: Mapping[str, object]) -> dict[str, Any]:
    """Return copies of tensors by name, in the containers and number types of others: arrays for arrays and so on."""
    return {name: _write_like(tensors[name], pattern) for name, pattern in patterns.items()}


def _write_like(tensor: Tensor, pattern: object) -> object:
    if isinstance(pattern, Tensor):
        return tensor.to(pattern.dtype, copy=True)
    if hasattr(pattern, "materialize"):  # what lay on the disk is a tensor
        return tensor.clone()
    return tensor.numpy().astype(np.asarray(pattern).dtype)


def weight_of_withheld(tensors: Mapping[str, Tensor]) -> float:
    """Return the number of local steps for which unchanged weights count in the mean.

    It is positive, since NVFlare's FedAvg takes any other number for 1 and other aggregators would divide by 0. With
    numbers of half precision it is 1: their products with a smaller one would be rounded to nothing.
    """
    epsilons = [torch.finfo(tensor.dtype).eps for tensor in tensors.values() if tensor.is_floating_point()]
    return NEXT_TO_NOTHING if all(epsilon <= FLOAT32_EPSILON for epsilon in epsilons) else 1.0


def withhold_meta(meta: Mapping[str, object]) -> dict[str, object]:
    """Return a DXO's meta with plain values as they are, arrays as zeros and nothing else.

    Control variates of SCAFFOLD travel in the meta. Its server asks for them, and zeros leave its own as they are.
    Of more plain values than a few metrics the largest entries are left out.
    """
    harmless = {name: found for name, value in meta.items() if (found := _harmless(value)) is not None}
    plain = {name: _without_arrays(value) for name, value in harmless.items()}
    left: dict[str, object] = {}
    for name in sorted(plain, key=lambda name: Beside.of(plain[name]).size):
        if Beside.of(left | {name: plain[name]}).may_leave_alone:
            left[name] = plain[name]
    return {name: value for name, value in harmless.items() if name in left}


def _without_arrays(value: object) -> object:
    """Return nested containers with nothing in the place of arrays, which are zeros by now."""
    if isinstance(value, Mapping):
        return {key: _without_arrays(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_without_arrays(entry) for entry in value]
    return None if isinstance(value, Tensor | np.ndarray) else value


def _harmless(value: object) -> object:
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor):
        return torch.zeros_like(value)
    if isinstance(value, np.ndarray):
        return np.zeros_like(value) if value.dtype.kind in "biuf" else None
    if isinstance(value, Mapping):
        return {key: kept for key, entry in value.items() if (kept := _harmless(entry)) is not None}
    if isinstance(value, list | tuple):
        return [kept for entry in value if (kept := _harmless(entry)) is not None]
    return None
