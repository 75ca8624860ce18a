# %% [markdown]
# # Redo a table
#
# HyperFL's Table 3 says that gradient inversion finds a picture in an update of FedAvg and noise in one of HyperFL. Its config comes with
# hyperleak. This page runs it made smaller, with the paper's figures beside ours, and with two attacks that the paper does not have.

# %%
from tempfile import mkdtemp

from IPython.display import Image, display

import hyperleak
from eval import config
from eval.experiment import config_catalog

# %% [markdown]
# ## The paper's config
#
# The first comment of a config says what a paper leaves open.

# %%
path = config_catalog.find_config("hyperfl/table3-emnist")
print(path.read_text()[:460])

# %% [markdown]
# ## Made smaller
#
# These are the same changes that `--set` and `--without` make on the command line. EMNIST is not at hand everywhere, so `faces` stands in;
# searches have a twentieth of the paper's iterations. The seed, the batch of one and the single local step stay.

# %%
changes = [
    "task.dataset=faces",
    "federation.partition={name: iid, clients: 4}",
    "attack.iterations=500",
    "attack.ig.tv_weight=1e-2",
    "attack.peel+ig.tv_weight=1e-2",
    "attack.joint.tv_weight=1e-2",
    "observe.images=4",
    "observe.classes=[face]",
]
experiment = config.load(path, changes, without=("bilevel",))
done = hyperleak.run(experiment, mkdtemp())

# %% [markdown]
# ## Ours beside the paper's

# %%
frame = done.frame()
table = (
    frame.groupby(["method", "attack"], sort=False)[["psnr", "floor_mean_psnr"]]
    .mean()
    .round(1)
)
table.columns = ["ours, dB", "baseline, dB"]
paper = {(entry.method, entry.attack): entry.psnr for entry in experiment.published}
table["paper, dB"] = [paper.get(pair, "") for pair in table.index]
table

# %% [markdown]
# ## The pictures
#
# A run keeps a picture of every attack: originals above reconstructions.

# %%
for attack in ("joint", "peel+cascade"):
    print(f"hyperfl, {attack}")
    (picture,) = (done.folder / "images").glob(f"hyperfl-none-{attack}-*.png")
    display(Image(str(picture)))

# %% [markdown]
# ## What to say of it
#
# - `joint` is the paper's own attack. `peel+ig` and `peel+cascade` know no more than it does: nothing but what is sent.
# - The paper's figures are of other images. A report sets figures side by side and says why they can't be compared.
# - `observe.method.head_epochs: 0` leaves out the epoch that trains HyperFL's classifier first. With that epoch on the same image nothing
#   comes back ([results](../results/hyperfl.md)). Say so beside the figure.
# - The whole table is `hyperleak run hyperfl/table3-emnist`; [the papers' tables](../results/papers.md) lists the others.
