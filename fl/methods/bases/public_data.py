"""A server that has images of its own, public ones, and works on them with what arrives from the clients."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from fl.data import Source
from fl.local.sampling import plan_batches
from fl.method import Download, ServerState
from fl.methods.bases.personal_models import final_model
from fl.methods.fedavg import FedAvg
from fl.parametrization import Parametrization
from fl.ranges import Count
from fl.seeds import stream
from fl.tensors import Tensors, Value, dense
from fl.types import Batch, Phase, Task, Upload

KEYS, SEED = "keys", "seed"
"""A payload of `ServerState.own`, and the name in it of what the server's own random numbers come from."""
INFERENCE_BATCH = 256
"""Images that are classified in one go."""


@dataclass(frozen=True, kw_only=True)
class PublicDataServer(FedAvg):
    """A base of methods whose server has images: clients train and send as in FedAvg, and are sent its result.

    The images come from a data set that the method names, never from the clients of a federation. Of the data set that
    clients train on, take the last `images` of a part, and give the task the rest of it by its own `limit` or
    `test_limit`: then no image is on both sides. They are read again in every process and are in no checkpoint.

    Attributes:
        public: the data set of the server's images, by name or settings.
        part: which images of it.
        images: how many of them, the last ones; None is all.
    """

    takes_statistics: ClassVar[bool] = False
    """Whether the server takes running statistics anew on its images, in train mode whatever the clients' is."""

    public: Source
    part: Literal["train", "test"] = "train"
    images: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.images is not None and self.images < 1:
            raise ValueError(f"expected images >= 1, or None for all, got {self.images}")
        if type(self.parametrization) is not Parametrization:
            raise ValueError("expected parametrization 'direct': the server trains the network itself")

    def init_server(self, params: Tensors, task: Task, clients: int, generator: torch.Generator) -> ServerState:
        """Return FedAvg's state and a seed; the images are looked at, so that what does not fit is said at once.

        They are read anew for each federation: a file may have changed since the last one.
        """
        _load.cache_clear()
        self._check_norms(task, self.public_images(task))
        server = super().init_server(params, task, clients, generator)
        return replace(server, own={KEYS: {SEED: torch.randint(2**31, (), generator=generator)}})

    def server_phase(self) -> Phase:
        """Return the phase in which the server feeds its images."""
        raise TypeError(f"{type(self).__name__} does not say how its server trains: define learning()")

    def public_images(self, task: Task) -> Batch:
        """Return the server's images, where the task's network lies and of its type.

        Raises:
            DatasetMissingError: the data set's file is not there.
            ValueError: there are too few images, or of another shape than the task's.
        """
        found, like = _load(self.public, self.part, self.images), next(iter(task.parameters.values()))
        if found.inputs.shape[1:] != torch.Size(task.input_shape):
            raise ValueError(
                f"public: expected images of shape {list(task.input_shape)}, as the clients', got "
                f"{list(found.inputs.shape[1:])}; name another data set, or its size if it has one"
            )
        return Batch(found.inputs.to(like), found.labels.to(like.device))

    def _check_norms(self, task: Task, images: Batch) -> None:
        """Refuse steps of one image where batch norm would have to take the variance of a single value.

        Raises:
            ValueError: there are such steps, and such a batch norm.
        """
        phase = self.server_phase()
        steps = split_batches(torch.arange(len(images)), phase.batch_size or len(images)) if phase.epochs != 0 else []
        if all(len(index) > 1 for index in steps):
            return
        if single := single_value_norm(task.model, images.inputs[:1], resting=self.takes_statistics):
            given = "1 image in all" if len(images) == 1 else f"server_batch {phase.batch_size}"
            raise ValueError(
                f"expected 2 images or more in each step of the server, got {given}: {single} of the network has one "
                f"value an image, whose variance over a single image is nothing; set server_batch to 2 or more, and "
                f"images, too, or take a network without batch norm there"
            )

    def server_generator(self, server: ServerState, *keys: object) -> torch.Generator:
        """Return the server's random numbers in this round, for the use that `keys` name."""
        seed = int(dense(server.own[KEYS][SEED]))
        return stream(seed, "public", server.round, *keys)

    def batches(self, server: ServerState, phase: Phase, count: int) -> list[Tensor]:
        """Return which of `count` images the server feeds in each step of a phase."""
        size = phase.batch_size or count
        passes = phase.epochs or -(-(phase.steps or 0) // len(split_batches(torch.arange(count), size)))
        whole = replace(phase, epochs=passes, steps=None, batch_size=None)
        (orders,) = plan_batches([whole], count, self.server_generator(server, "order"))
        return [index for (order,) in orders for index in split_batches(order, size)][: phase.steps]


@lru_cache(maxsize=4)
def _load(public: Source, part: str, images: int | None) -> Batch:
    data = public.load()
    found = data.train if part == "train" else data.test
    if not len(found) or len(found) < (images or 0):
        raise ValueError(f"public: expected {images or 1} images or more in {data.name}, {part}, got {len(found)}")
    return found.take(torch.arange(len(found))[-(images or 0) :])


def split_batches(whole: Tensor, size: int) -> list[Tensor]:
    """Return batches of `size`, in order.

    A single image left over joins the batch before, as batch norm trains on no one.
    """
    found = list(whole.split(size))
    if len(found) > 1 and len(found[-1]) == 1 < size:
        found[-2:] = [torch.cat(found[-2:])]
    return found


def single_value_norm(model: nn.Module, image: Tensor, *, resting: bool) -> str:
    """Return the name of the first batch norm that gets one value a channel of `image` (1, C, H, W), or nothing.

    Args:
        model: that has it.
        image: a single one.
        resting: whether to look at batch norm in evaluation mode, too.
    """
    judge, found = copy.deepcopy(model), list[str]()

    def look(name: str, given: Tensor) -> None:
        if given.numel() == given.shape[1]:
            found.append(name)

    for name, part in judge.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and (resting or part.training):
            part.register_forward_pre_hook(lambda _, given, name=name: look(name, given[0]))
    with torch.no_grad():
        judge.eval()(image)
    return next(iter(found), "")


def client_result(server: ServerState, upload: Upload) -> tuple[Tensors, dict[str, Tensor]]:
    """Return the parameters and buffers that a client ended with; integer buffers are the server's."""
    model = final_model(Download(server.shared, server.buffers), upload)
    buffers = {name: dense(model.get(name, value)) for name, value in server.buffers.items()}
    return {name: model[name] for name in server.shared}, buffers


def build_module(task: Task, params: Mapping[str, Value], buffers: Mapping[str, Tensor]) -> nn.Module:
    """Return the task's network as a module of its own with these values, in the mode in which clients train it."""
    model = copy.deepcopy(task.model)
    values = {**{name: dense(value) for name, value in params.items()}, **buffers}
    model.load_state_dict({**model.state_dict(), **values})
    return model


def with_module_state(model: nn.Module, server: ServerState) -> ServerState:
    """Return `server` with the values of a module that it trained; integer buffers stay, as they do in FedAvg."""
    found = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return replace(
        server,
        shared={name: found[name] for name in server.shared},
        buffers={n: found[n] if value.is_floating_point() else value for n, value in server.buffers.items()},
    )


def ensemble_logits(models: Sequence[nn.Module], inputs: Tensor) -> Tensor:
    """Return logits of every image by every network in evaluation mode (M, N, K)."""
    found = []
    with torch.no_grad():
        for model in models:
            judge = copy.deepcopy(model).eval()
            found.append(torch.cat([judge(part) for part in inputs.split(INFERENCE_BATCH)]))
    return torch.stack(found)
