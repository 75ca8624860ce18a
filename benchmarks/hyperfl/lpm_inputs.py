"""What HyperFL-LPM's last adapter was given, read off an update.

Run it by `python -m benchmarks.hyperfl.lpm_inputs` (needs HYPERLEAK_DATA).

Relative errors of the mean over the map that goes into adapter3 of the network of
`configs/reproduce/hyperfl/curves-lpm-cifar10`, a real trunk, before any round: one image in one step, float32.
"""

from __future__ import annotations

from statistics import median

import torch
from torch import Tensor

import fl.data
from attacks.base import NotApplicable, Reconstruction
from attacks.hypernetworks.peel import HypernetPeel
from benchmarks.common import publish, table
from benchmarks.hyperfl.peel import error, uploaded
from fl.client import Client
from fl.data.partitions.dominant_classes import DominantGroups
from fl.federation import ClientData, Federation
from fl.methods.hyperfl_lpm import HyperFLLPM
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
from fl.models.resnet_adapter import ResNetAdapter
from fl.types import Truth
from fl.view import ServerView

TRUNK = "weights/resnet18_imagenet_to_layer3_bnfolded_fp16.npz"
INITS = ("published", "scaled", "network")
LAYER, IMAGES = "body.adapter3", 8


def federation(init: str) -> Federation:
    """Return the first client of ten, before any round."""
    images = fl.data.load("cifar10")
    split = DominantGroups(clients=10, train_size=200, test_size=100)(images)
    own = ClientData(images.train.take(split.train[0]), images.test.take(split.test[0]))
    method = HyperFLLPM(steps=1, head_epochs=0, batch_size=None, parametrization=Hypernetwork(init=init))  # type: ignore[arg-type]
    task = ResNetAdapter(stages=3, weights=TRUNK, image_size=64).build_task(num_classes=images.num_classes)
    return Federation(Client(task, method), [own])


def mean_layer_input(view: ServerView, truth: Truth) -> Tensor:
    """Return the mean (C,) over the map that the layer was really given."""
    client, seen = view.client, list[Tensor]()
    model = client.fixed_statistics_model
    handle = model.get_submodule(LAYER).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    params = view.method.parametrization.lift({**view.shared, **truth.private})
    with torch.no_grad():
        client.network(params, client.task.buffers)(truth.inputs)
    handle.remove()
    (value,) = seen
    return value[0].mean((1, 2))


def measure(view: ServerView, truth: Truth) -> float | None:
    """Return the relative error of what the peel reads, or None where it reads nothing."""
    found = HypernetPeel()(view)
    if isinstance(found, NotApplicable) or f"features/{LAYER}" not in found.private:
        return None
    assert isinstance(found, Reconstruction)
    read = found.private[f"features/{LAYER}"]
    assert isinstance(read, Tensor)
    return error(read, mean_layer_input(view, truth))


def rows_of(init: str) -> list[dict[str, object]]:
    """Both uploads of every image."""
    run, rows = federation(init), []
    for image in range(IMAGES):
        view, truth = run.observe(0, data=run.data[0].train.take(torch.tensor([image])))
        for upload, seen in (("factored", view), ("dense", uploaded(view))):
            rows.append({"init": init, "upload": upload, "image": image, "error": measure(seen, truth)})
    return rows


def main() -> None:
    """Measure and write the table."""
    torch.set_num_threads(1)
    rows = [row for init in INITS for row in rows_of(init)]
    cells = []
    for init in INITS:
        for upload in ("factored", "dense"):
            errors = [row["error"] for row in rows if (row["init"], row["upload"]) == (init, upload)]
            known = sorted(value for value in errors if isinstance(value, float))
            ends = [f"{f(known):.1e}" if known else "-" for f in (min, median, max)]
            cells.append([init, upload, f"{len(known)} of {IMAGES}", *ends])
    lines = [
        "# What the last adapter of HyperFL-LPM was given",
        "",
        "Relative error of the mean input of adapter3 (256 features) that `peel` reads off one update: client 0 of ten",
        "on CIFAR-10 (dominant groups), a real ResNet-18 up to layer3, images at 64 pixels, one in one step, float32,",
        'before any round. "factored": the update as the simulator holds it; "dense": parameters before minus after.',
        "",
    ]
    head = ["init", "upload", "read", "least error", "median", "greatest"]
    publish("lpm_inputs", {"rows": rows}, lines + table(head, cells))


if __name__ == "__main__":
    main()
