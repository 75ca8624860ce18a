"""Each peer's attack as a function of a victim. Nothing of a peer's is here but the names by which it is called."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.peers.sources import BREACHING, IDLG, IG, ROG, Source, execute, importable
from benchmarks.peers.victims import Victim, normalized
from fl.types import Task


@dataclass(frozen=True)
class Run:
    """What an attack made of one victim.

    Attributes:
        image: (1, C, H, W), as the attack left it, in units of pixels.
        iterations: moves of the guess.
        seconds: of CPU time.
    """

    image: Tensor
    iterations: int
    seconds: float


@dataclass(frozen=True)
class Setting:
    """What a peer is asked to do.

    Attributes:
        task: the network and its statistics.
        iterations: of the search.
        tv: weight of the total variation, of normalized images.
    """

    task: Task
    iterations: int
    tv: float = 0.0

    @property
    def statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation (C, 1, 1)."""
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.task.mean, self.task.std))
        return mean, std

    def pixels(self, images: Tensor) -> Tensor:
        """Of normalized images."""
        mean, std = self.statistics
        return images.detach() * std + mean


Peer = Callable[[Victim], Run]


@contextlib.contextmanager
def starting(generator: torch.Generator) -> Iterator[None]:
    """The global generator gives what `generator` would give, for code that draws from it; silent meanwhile."""
    with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(io.StringIO()):
        torch.set_rng_state(generator.get_state())
        yield


def original_ig(setting: Setting) -> Peer:
    """IG's authors' reconstructor, with the settings of their command line: signed Adam, cosine, step decay, box."""
    importable(IG.find())
    library: Any = importlib.import_module("inversefed")
    config = {
        "signed": True,
        "boxed": True,
        "cost_fn": "sim",
        "indices": "def",
        "weights": "equal",
        "lr": 0.1,
        "optim": "adam",
        "restarts": 1,
        "max_iterations": setting.iterations,
        "total_variation": setting.tv,
        "init": "randn",
        "filter": "none",
        "lr_decay": True,
        "scoring_choice": "loss",
    }
    model = normalized(setting.task)

    def run(victim: Victim) -> Run:
        with starting(victim.start()):
            begin = time.process_time()
            attack = library.GradientReconstructor(model, setting.statistics, config, num_images=1)
            found, _ = attack.reconstruct(victim.gradient, victim.label, setting.task.input_shape)
            spent = time.process_time() - begin
        return Run(setting.pixels(found), setting.iterations, spent)

    return run


def breaching(setting: Setting) -> Peer:
    """Return the attack `invertinggradients` of breaching.

    Its total variation is the sum of both directions' means, as everyone's, whatever the comment in its settings says;
    the border counts as if the image went on in the data set's mean color.
    """
    importable(BREACHING.find())
    with warnings.catch_warnings():  # of TorchScript and of Hydra, on import
        warnings.simplefilter("ignore")
        library: Any = importlib.import_module("breaching")
        changes = [
            f"optim.max_iterations={setting.iterations}",
            f"regularization.total_variation.scale={setting.tv}",
        ]
        with contextlib.redirect_stdout(io.StringIO()):
            config = library.get_attack_config("invertinggradients", overrides=changes)
    logging.getLogger("breaching").setLevel(logging.WARNING)
    model = normalized(setting.task).eval()
    task = setting.task
    metadata = SimpleNamespace(modality="vision", shape=task.input_shape, mean=task.mean, std=task.std)
    weights = [p.detach() for p in model.parameters()]

    def run(victim: Victim) -> Run:
        sent = [{"parameters": weights, "buffers": list(model.buffers()), "metadata": metadata}]
        about = {"num_data_points": 1, "labels": victim.label, "local_hyperparams": None}
        received = [{"gradients": list(victim.gradient), "buffers": None, "metadata": about}]
        with starting(victim.start()):
            begin = time.process_time()
            attack = library.attacks.prepare_attack(model, nn.CrossEntropyLoss(), config)
            found, _ = attack.reconstruct(sent, received, {})
            spent = time.process_time() - begin
        return Run(setting.pixels(found["data"]), setting.iterations, spent)

    return run


def idlg(setting: Setting) -> Peer:
    """Return the script of iDLG's authors: `setting.iterations` steps of torch's L-BFGS, each of up to 20 evaluations.

    All of it is in one function, data, loop and plots. It is run as it stands for one image and iDLG alone; its data
    set is that image, its network ours, and nothing is plotted. It looks whether to stop, and shows where it is, after
    every 30th part of its steps: the last one shown is the result.
    """
    path = IDLG.find() / IDLG.file
    every = setting.iterations // 30
    if (setting.iterations - 1) % every:
        raise ValueError(f"expected a number of steps whose last one is shown, got {setting.iterations}")

    def run(victim: Victim) -> Run:
        shown: list[Tensor] = []
        model, calls = copy.deepcopy(setting.task.model), [0]

        def show(image: Tensor) -> None:
            if image.requires_grad:  # the guess, not the image beside it
                shown.append(image.detach().clone())

        def count(*_: object) -> None:
            calls[0] += 1

        model.register_forward_pre_hook(count)
        data = SimpleNamespace(CIFAR100=lambda *_, **__: [(victim.image[0], int(victim.label))])
        tools = SimpleNamespace(ToTensor=lambda: lambda x: x, ToPILImage=lambda: show, Compose=lambda steps: steps[0])
        given = {
            "os": SimpleNamespace(path=os.path, mkdir=lambda *_: None),
            "np": SimpleNamespace(random=SimpleNamespace(permutation=range)),
            "plt": _Silent(),
            "datasets": data,
            "transforms": tools,
        }
        constants = {
            "dataset": "cifar100",
            "Iteration": setting.iterations,
            "num_exp": 1,
            "method": ["iDLG"],
            "use_cuda": False,
        }
        script = execute(path, given, constants)
        script |= {"LeNet": lambda **_: model, "weights_init": lambda _: None}
        with starting(victim.start()):
            begin = time.process_time()
            script["main"]()
            spent = time.process_time() - begin
        steps = (len(shown) - 1) * every + 1
        # one call is the client's; a step makes as many evaluations as moves, and one more tells the loss it ends at
        return Run(shown[-1][None], calls[0] - 1 - steps, spent)

    return run


def rog(setting: Setting) -> Peer:
    """Return the search of ROG's authors: a code a quarter as large, Adam, squared distance, bicubic interpolation.

    Their networks that sharpen the result are for photographs of 128 x 128 pixels, and come as files of their own.
    """
    path = ROG.find() / ROG.file
    unused = ("Adam16", "single2tensor4", "USRNet", "Discriminator", "Ccgenerator", "Generator", "MetaNN", "models")
    drawn: list[torch.Generator] = []

    def uniform(*shape: int) -> np.ndarray[Any, Any]:
        return torch.rand(shape, generator=drawn[-1]).numpy()

    numbers = SimpleNamespace(random=SimpleNamespace(rand=uniform), float32=np.float32, float16=np.float16)
    # `networks` and `utils` would be imported for what comes after the search
    script = execute(path, {"np": numbers, "loadmat": None, **dict.fromkeys(unused)})
    options = SimpleNamespace(
        T_max=setting.iterations,
        half=False,
        device="cpu",
        sample_size=setting.task.input_shape[1:],
        rog_lr=0.05,
        printevery=setting.iterations,
        fed_lr=1.0,
    )
    model = copy.deepcopy(setting.task.model)
    onehot = torch.eye(setting.task.num_classes)

    def run(victim: Victim) -> Run:
        drawn.append(victim.start())
        begin = time.process_time()
        attack = script["Attacker"](options, F.cross_entropy)
        given = (victim.gradient, victim.image, onehot[victim.label], model)
        code = attack.grad_inv(*given, logging.getLogger(__name__))
        spent = time.process_time() - begin
        image = F.interpolate(code.detach(), scale_factor=attack.sf, mode="bicubic")
        return Run(image, setting.iterations, spent)

    return run


class _Silent:
    """Stands for a plotting library."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


PEERS: dict[str, tuple[Source, Callable[[Setting], Peer]]] = {
    "invertinggradients": (IG, original_ig),
    "breaching": (BREACHING, breaching),
    "iDLG": (IDLG, idlg),
    "ROG": (ROG, rog),
}
