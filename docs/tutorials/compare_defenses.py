# %% [markdown]
# # Compare defenses
#
# A defense that works only while it is secret has shown little. This page attacks FedAvg under six defenses twice: by an attacker who
# does not know of them, and by one who does.

# %%
from tempfile import mkdtemp

import matplotlib.pyplot as plt
import pandas as pd

import hyperleak

# %% [markdown]
# ## The experiment
#
# An experiment is plain data, as in a YAML file. Every defense meets the same attack on the same faces. `threat` says what the
# attacker knows.

# %%
DEFENSES = [
    "none",
    {"name": "clip", "max_norm": 0.01},
    {"name": "quantize", "bits": 4},
    {"name": "prune", "ratio": 0.9},
    {"name": "noise", "std": 0.1},
    {"name": "soteria"},
]


def settings(*, knows_defense: bool) -> dict:
    return {
        "task": {"dataset": "faces", "model": "hyperfl-grey"},
        "federation": {"partition": {"name": "iid", "clients": 4}, "rounds": 0},
        "method": [{"name": "fedavg", "lr": 0.05}],
        "defense": DEFENSES,
        "attack": [{"name": "ig", "iterations": 300, "tv_weight": 1e-2}],
        "observe": {"images": 6, "method": {"steps": 1}, "classes": ["face"]},
        "threat": {"knows_defense": knows_defense},
    }


def run(*, knows_defense: bool) -> pd.DataFrame:
    return hyperleak.run(settings(knows_defense=knows_defense), mkdtemp()).frame()


frames = {"unaware": run(knows_defense=False), "adapts": run(knows_defense=True)}

# %% [markdown]
# ## The table
#
# PSNR in dB, mean over six faces. The baseline is each face's own mean color: the score of a guess that knows nothing of the update.

# %%
table = pd.DataFrame(
    {
        name: frame.groupby("defense")["psnr"].mean()
        for name, frame in frames.items()
    }
)
table["baseline"] = frames["adapts"].groupby("defense")["floor_mean_psnr"].mean()
table.sort_values("adapts").round(1)

# %% [markdown]
# ## The figure

# %%
ordered = table.sort_values("adapts")
figure, axis = plt.subplots(figsize=(7, 3.2))
axis.scatter(
    ordered["unaware"],
    ordered.index,
    marker="o",
    facecolors="none",
    edgecolors="C0",
    label="does not know of it",
)
axis.scatter(
    ordered["adapts"], ordered.index, marker="o", color="C0", label="adapts to it"
)
axis.axvline(table["baseline"].mean(), color="gray", linewidth=1, label="baseline")
axis.set_xlabel("PSNR, dB")
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# ## How to read it
#
# - A defense whose two points lie apart worked by surprise alone.
# - A point near the baseline says that *this* search found nothing. Exact attacks and learned inverters may find more:
#   `hyperleak list attacks` names them, and [every defense](../results/index.md) has sixteen images of each.
# - Six faces of one network are a demonstration. Take more images and seeds before you say so in a paper; reports carry intervals.
# - Say what a defense costs, too: with `federation.rounds` above 0 the report has accuracy beside leakage.
