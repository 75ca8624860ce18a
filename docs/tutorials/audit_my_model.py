# %% [markdown]
# # Audit my model
#
# You train a network with clients and want to know what one update says about the pictures behind it. This page takes a small
# convolutional network, lets a client make one step on one face, and hands the update to attacks: first one that solves, then
# one that searches. Then it tries what a defense changes.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import attacks
from defenses import defenses
from eval.audit import leakage
from fl.capture import from_batch, from_update
from fl.data import load
from fl.methods.fedavg import FedAvg

# %% [markdown]
# ## A model and a picture
#
# The model is any `nn.Module` that returns logits. Pixels are in [0, 1]. `faces` comes with scikit-image.

# %%
# Your script may draw from the global generator; hyperleak never does.
torch.random.default_generator.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 16, 5, padding=2),
    nn.LeakyReLU(0.01),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 5, padding=2),
    nn.LeakyReLU(0.01),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(32 * 7 * 7, 128),
    nn.LeakyReLU(0.01),
    nn.Linear(128, 2),
)
faces = load("faces")
image, label = faces.train.inputs[:1], faces.train.labels[:1]

# %% [markdown]
# ## What the server sees
#
# `from_batch` runs one local step and splits it: `view` is all that the server has, `truth` stays with you for scoring.

# %%
view, truth = from_batch(model, image, label)
print("tensors in the update:", len(view.update))
print("images in it:", view.batch_size)
print("labels known:", view.threat.knows_labels)

# %% [markdown]
# ## An attack that solves
#
# `cascade` computes the picture, layer by layer. Where it can, it says from the update alone whether it is right.

# %%
solved = attacks.build("cascade")(view, seed=0)
print(leakage(solved, truth))
print("confirmed without the truth:", solved.verified)

# %% [markdown]
# ## An attack that searches
#
# `ig` moves a guessed picture until it would cause the update. It takes any network, and ends near the picture, not at it.

# %%
searched = attacks.build({"name": "ig", "iterations": 300})(view, seed=0)
print(leakage(searched, truth))


# %%
def show(*pictures: tuple[str, torch.Tensor]) -> None:
    _, axes = plt.subplots(1, len(pictures), figsize=(2.2 * len(pictures), 2.5))
    for axis, (name, picture) in zip(axes, pictures, strict=True):
        axis.imshow(picture.squeeze(), cmap="gray", vmin=0, vmax=1)
        axis.set_title(name)
        axis.axis("off")
    plt.show()


show(
    ("the client's", image),
    ("solved", solved.inputs),
    ("searched", searched.inputs),
)

# %% [markdown]
# ## The same under a defense
#
# A defense is part of the view, so that the attacker adapts to it. Here 1 % of noise is added to every tensor.

# %%
noise = defenses.build({"name": "noise", "std": 0.01})
noisy, truth = from_batch(model, image, label, defense=noise)
blurred = attacks.build("cascade")(noisy, seed=0)
print(leakage(blurred, truth))
show(("the client's", image), ("under noise", blurred.inputs))

# %% [markdown]
# ## An update that you captured
#
# Where you have an update and no batch, `from_update` makes the view. An update is *weights before minus weights after*. Say how the
# client trained, as far as you know.

# %%
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before = {name: value.detach().clone() for name, value in model.named_parameters()}
nn.functional.cross_entropy(model(image), label).backward()
optimizer.step()
update = {
    name: before[name] - value.detach() for name, value in model.named_parameters()
}
model.load_state_dict(before)

how = FedAvg(lr=0.1, steps=1, batch_size=None)
captured = from_update(
    model, update, input_shape=(1, 28, 28), num_classes=2, method=how
)
found = attacks.build("cascade")(captured, seed=0)
print("confirmed without the truth:", found.verified)
show(("the client's", image), ("from the captured update", found.inputs))

# %% [markdown]
# ## What to do next
#
# - The command does all of this, and picks the attacks: `hyperleak audit my_model:build --images faces --count 4`.
# - Pass your clients' own `method` to `from_batch` (epochs, batches, momentum): one step on one image is the case best for the attacker.
# - An attack that does not apply says why. [Measuring leakage](../concepts/measuring-leakage.md) says when that is an all-clear.
