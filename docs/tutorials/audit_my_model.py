# %% [markdown]
# # Audit my model
#
# You train a network with clients and want to know what one update says about the pictures behind it. This page takes a small
# convolutional network, audits it in one call, and then looks at the parts of that call: what the server sees, an attack that
# solves, one that searches, and what a defense changes.

# %%
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt
import torch
from torch import nn

import attacks
import hyperleak
from defenses import defenses
from eval.audit import leakage
from fl.capture import from_batch
from fl.data import load

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
# ## One call
#
# `hyperleak.audit` lets a client make one step on each picture and hands the updates to the attacks that fit, until nothing is left to
# find. With `out` it writes a report. You would name a folder that stays.

# %%
folder = TemporaryDirectory()
report = hyperleak.audit(model, image, label, out=folder.name)
for finding in report.findings:
    print(f"{finding.attack}: {finding.verdict}\n")

# %% [markdown]
# Every figure stands beside the best guess that needs no update. `frame` has them all as a table; `report.html` in the folder is for the
# browser.

# %%
result = hyperleak.load(folder.name)
result.frame()[["attack", "psnr", "floor_mean_psnr", "ssim", "verified"]]

# %% [markdown]
# The rest of this page does the same by hand.
#
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
# If you have an update and no batch, give it as `update`: *weights before minus weights after*, by name, or the file that holds them.
# Say how the client trained, as far as you know. Without the picture nothing can be scored; an exact attack can tell by itself whether
# it is right.

# %%
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before = {name: value.detach().clone() for name, value in model.named_parameters()}
nn.functional.cross_entropy(model(image), label).backward()
optimizer.step()
update = {
    name: before[name] - value.detach() for name, value in model.named_parameters()
}
model.load_state_dict(before)

captured = hyperleak.audit(
    model,
    update=update,
    input_shape=(1, 28, 28),
    method={"name": "fedavg", "lr": 0.1, "steps": 1, "batch_size": None},
    attacks=["cascade"],
)
print(captured.findings[0].verdict)
print("confirmed without the truth:", captured.findings[0].verified)
folder.cleanup()

# %% [markdown]
# ## What to do next
#
# - The command does the same: `hyperleak audit model my_model:build --images faces --count 4 --out audit`.
# - Give your clients' own `method` (epochs, batches, momentum): one step on one image is the best case for the attacker.
# - An attack that does not apply says why. [Measuring leakage](../concepts/measuring-leakage.md) says when that is an all-clear.
# - [Use it from Python](../how-to/use-from-python.md) has experiments and figures, too.
