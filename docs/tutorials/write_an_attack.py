# %% [markdown]
# # Write an attack
#
# An attack is one class: it takes what a server has, and returns a reconstruction or says why it does not apply. This page writes one that
# reads the input of a fully connected layer off its update, tries it on a model and on a federated method, and chains it.

# %%
from dataclasses import dataclass
from typing import ClassVar

import matplotlib.pyplot as plt
import torch
from torch import nn

import attacks
from attacks.base import Attack, NotApplicable, Reconstruction
from attacks.update.observed_update import ObservedUpdate
from eval.audit import leakage
from fl.capture import from_batch
from fl.data import load
from fl.methods.fedavg import FedAvg
from fl.tensors import dense
from fl.view import ServerView

# %% [markdown]
# ## The idea
#
# A linear layer with input x sends δ xᵀ for its weight and δ for its bias. So x = dWᵀ db / |db|², after any number of steps on one image.
#
# ## The class
#
# It is a frozen dataclass. Its fields are its settings, and `register` gives it a name. `plain` says in plain words what it does; the
# docstring names the source and every setting.


# %%
@attacks.attacks.register("first-layer")
@dataclass(frozen=True, kw_only=True)
class FirstLayer(Attack):
    """What the first linear layer is given by a single image (Geiping et al., NeurIPS 2020, Proposition 3.1).

    Attributes:
        tolerance: share of the update that may be left over for the attack to call itself right.
    """

    plain: ClassVar[str] = (
        "reads what the first fully connected layer was given off its update, without guessing."
    )

    tolerance: float = 1e-3

    def attack_view(
        self, view: ServerView, seed: int
    ) -> Reconstruction | NotApplicable:
        """The layer's input, as an image where it is one."""
        observed = ObservedUpdate(
            view
        )  # weight decay and a known defense taken off
        adaptive = any(
            p.optimizer != "sgd"
            for p in view.method.phases(view.client.task, view.round)
        )
        if view.batch_size != 1 or adaptive or observed.unknown_decay:
            return NotApplicable("it takes one image, SGD and a known schedule")
        change = observed.change
        linear = [
            name
            for name, module in view.task.model.named_modules()
            if isinstance(module, nn.Linear)
        ]
        name = next(
            (n for n in linear if {f"{n}.weight", f"{n}.bias"} <= set(change)),
            None,
        )
        if name is None or not bool(dense(change[f"{name}.bias"]).any()):
            return NotApplicable("no linear layer with a bias moved")
        weight, bias = (
            dense(change[f"{name}.weight"]),
            dense(change[f"{name}.bias"]),
        )
        x = bias @ weight / (bias @ bias)
        verified = bool(
            (weight - torch.outer(bias, x)).norm() < self.tolerance * weight.norm()
        )
        shape = torch.Size(view.task.input_shape)
        if x.numel() != shape.numel():
            return Reconstruction(
                inputs=None, private={"features": x}, verified=verified
            )
        mean, std = (
            torch.tensor(v).to(x).view(-1, 1, 1)
            for v in (view.task.mean, view.task.std)
        )
        image = (
            x.view(1, *shape) * std + mean if view.task.mean else x.view(1, *shape)
        )
        return Reconstruction(inputs=image.clamp(0, 1), verified=verified)


# %% [markdown]
# ## On a model

# %%
# Your script may draw from the global generator; hyperleak never does.
torch.random.default_generator.manual_seed(0)
model = nn.Sequential(
    nn.Flatten(), nn.Linear(28 * 28, 64), nn.Sigmoid(), nn.Linear(64, 2)
)
faces = load("faces")
image, label = faces.train.inputs[:1], faces.train.labels[:1]

view, truth = from_batch(model, image, label)
found = attacks.build("first-layer")(view, seed=0)
print(leakage(found, truth))

figure, axes = plt.subplots(1, 2, figsize=(4.4, 2.5))
for axis, picture, name in zip(
    axes, (image, found.inputs), ("the client's", "first-layer"), strict=True
):
    axis.imshow(picture.squeeze(), cmap="gray", vmin=0, vmax=1)
    axis.set_title(name)
    axis.axis("off")
plt.show()

# %% [markdown]
# ## Where it ends
#
# Several local steps are no obstacle to the equation as long as one image is fed: every step's input is the same. With a batch the equation
# fails. An attack then says "not applicable" with a reason; it never guesses in silence.

# %%
several = FedAvg(lr=0.1, steps=5, batch_size=None)
view, truth = from_batch(model, image, label, method=several)
print(leakage(attacks.build("first-layer")(view, seed=0), truth))

view, truth = from_batch(model, faces.train.inputs[:4], faces.train.labels[:4])
print(attacks.build("first-layer")(view, seed=0))

# %% [markdown]
# ## In a chain
#
# `headless` cuts a classifier off that the client keeps, `peel` opens a hypernetwork. What follows them attacks the view that they leave:
# any registered attack does, also this one.

# %%
view, truth = from_batch(model, image, label)
chained = attacks.build("headless+first-layer")(view, seed=0)
print(chained if isinstance(chained, NotApplicable) else leakage(chained, truth))

# %% [markdown]
# ## What to do next
#
# - Put the class into a file and name it: `hyperleak run quickstart --import my_attack.py`
#   ([a file of your own](../how-to/own-file.md)).
# - [Add an attack](../how-to/add-an-attack.md) has the same one as a file, with its settings and its tests.
# - `pytest tests/contract` takes every registered attack by itself: the same seed the same numbers, settings that survive YAML, nothing
#   changed in place.
