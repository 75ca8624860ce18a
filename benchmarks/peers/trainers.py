"""Each peer's round of FedAvg as its authors wrote it. Nothing of a peer's is here but the names it is called by.

Peers draw from the global generators of torch and NumPy, and seed them; nothing of ours does.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.peers.rounds import DECAY, IMAGES, LR, MOMENTUM, NOISE, PeerTrainer, Setting
from benchmarks.peers.sources import HYPERFL, PFL_RESEARCH, PFLLIB, importable
from benchmarks.performance.noise_data import BATCH
from fl.types import Batch

NEVER = 10**6
"""An iteration that is not reached."""


def local_sgd(parameters: Iterator[nn.Parameter], lr: float) -> torch.optim.SGD:
    """Return the optimizer that the HyperFL authors have in their code, for peers that leave it open."""
    return torch.optim.SGD(parameters, lr, MOMENTUM, weight_decay=DECAY)


class PFLlib(PeerTrainer):
    """Every client is handed the server's weights and trains; the server's mean is left out."""

    source = PFLLIB
    licence = "Apache-2.0"
    changes = (
        "each client's optimizer, plain SGD there, is replaced by one with momentum and decay. Its server is not run, "
        "so there is no aggregation in its figure. Clients read their images from disk in every round, as they do "
        "there, written as its own scripts write them (compressed npz)."
    )

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        importable(self.source.find(), "system")
        made = importlib.import_module("flcore.clients.clientavg").clientAVG
        self.folder = tempfile.TemporaryDirectory()  # it opens ../dataset/NAME, and an absolute NAME is all of the path
        self.model = setting.plain_model
        self.clients = []
        for number, own in enumerate(setting.data()):
            self._write(number, own)
            client = made(self._args(), number, IMAGES, 1, train_slow=False, send_slow=False)
            client.optimizer = local_sgd(client.model.parameters(), LR)
            if not setting.shuffle:
                client.load_train_data = self._in_order(client.load_train_data)
            self.clients.append(client)

    def _args(self) -> types.SimpleNamespace:
        """Return what its command line would hold, as far as clients look at it."""
        return types.SimpleNamespace(
            model=self.model,
            algorithm="FedAvg",
            dataset=self.folder.name,
            device="cpu",
            save_folder_name="items",
            num_classes=10,
            batch_size=BATCH,
            local_learning_rate=LR,
            local_epochs=self.setting.epochs,
            few_shot=0,
            learning_rate_decay_gamma=0.99,
            learning_rate_decay=False,
        )

    def _write(self, number: int, own: Batch) -> None:
        path = Path(self.folder.name) / "train" / f"{number}.npz"
        path.parent.mkdir(exist_ok=True)
        held: Any = {"x": own.inputs.numpy(), "y": own.labels.numpy()}
        np.savez_compressed(path, data=held)

    @staticmethod
    def _in_order(load: Any) -> Any:
        return lambda: DataLoader(load().dataset, BATCH)

    def round(self) -> None:
        """Without aggregation."""
        for client in self.clients:
            client.set_parameters(self.model)
            client.train()

    def weights(self) -> list[Tensor]:
        """Return the client's part."""
        return [p.detach() for p in self.clients[0].model.parameters()]

    def close(self) -> None:
        """The images on disk."""
        self.folder.cleanup()


class PflResearch(PeerTrainer):
    """One central iteration of FederatedAveraging in the simulated backend, without evaluation."""

    source = PFL_RESEARCH
    licence = "Apache-2.0"
    changes = (
        "nothing. It never shuffles a client's images. Models are not evaluated, nor metrics reported: the first three "
        "steps of its `FederatedAlgorithm.run`."
    )

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        importable(self.source.find())
        module = _with_loss(setting.plain_model)
        self.model = _pfl("model.pytorch").PyTorchModel(module, local_sgd, torch.optim.SGD(module.parameters(), 1.0))
        users = {number: (own.inputs, own.labels) for number, own in enumerate(setting.data())}
        sampler = _pfl("data.sampling").get_user_sampler("minimize_reuse", list(users))
        data = _pfl("data.federated_dataset").FederatedDataset.from_slices(users, sampler)
        weighting = _pfl("aggregate.weighting").WeightByDatapoints()
        self.backend = _pfl("aggregate.simulate").SimulatedBackend(data, data, [weighting])
        self.algorithm = _pfl("algorithm.federated_averaging").FederatedAveraging()
        self.local = _pfl("hyperparam").NNTrainHyperParams(
            local_num_epochs=setting.epochs, local_learning_rate=LR, local_batch_size=BATCH
        )
        self.central = _pfl("algorithm.base").NNAlgorithmParams(
            central_num_iterations=NEVER,
            evaluation_frequency=NEVER,
            train_cohort_size=setting.clients,
            val_cohort_size=None,
        )
        self.iteration = 1  # iteration 0 is always evaluated

    def round(self) -> None:
        """With aggregation."""
        contexts, model, _ = self.algorithm.get_next_central_contexts(
            self.model, self.iteration, self.central, self.local
        )
        results = _pfl("algorithm.algorithm_utils").run_train_eval(self.algorithm, self.backend, model, contexts)
        (statistics, metrics), (context, *_) = results[0], contexts
        self.algorithm.process_aggregated_statistics_from_all_contexts(((context, statistics),), metrics, model)
        self.iteration += 1

    def weights(self) -> list[Tensor]:
        """Return the server's part."""
        return [p.detach() for p in self.model.pytorch_model.parameters()]


def _pfl(name: str) -> Any:
    return importlib.import_module(f"pfl.{name}")


def _with_loss(module: Any) -> nn.Module:
    """Return the module with the two functions that pfl-research asks for."""
    module.loss = lambda inputs, labels: F.cross_entropy(module(inputs), labels)
    module.metrics = dict
    return module


class HyperFLAuthors(PeerTrainer):
    """A round of the authors' FedAvg by their own function, with its aggregation."""

    source = HYPERFL
    licence = "none"
    changes = (
        "nothing; it imports cvxpy, which a round does not use, and is given an empty module. Clients classify their "
        "test images before and after training, here a single one. The networks are theirs: activation before pooling."
    )
    update = "LocalUpdate_FedAvg"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        importable(self.source.find(), "cnn")
        sys.modules.setdefault("cvxpy", types.ModuleType("cvxpy"))
        networks, methods = importlib.import_module("models.cnn"), importlib.import_module("methods")
        self.running = importlib.import_module("running")
        self.args: Any = types.SimpleNamespace(
            device="cpu",
            lr=LR,
            local_bs=BATCH,
            epochs=200,
            local_epoch=setting.epochs,
            num_users=setting.clients,
            frac=1.0,
        )
        build = {"hyperfl-colour": networks.CifarCNN, "hyperfl-grey": networks.CNN_FMNIST}[setting.network]
        self.server = _same_weights(build(), setting.plain_model)
        rule = getattr(methods, self.update)
        self.clients = [
            rule(i, self.args, *self._loaders(own), copy.deepcopy(self.server)) for i, own in enumerate(setting.data())
        ]

    def _loaders(self, own: Batch) -> Sequence[DataLoader[Any]]:
        train, test = (TensorDataset(b.inputs, b.labels) for b in (own, own.take(torch.arange(1))))
        return DataLoader(train, BATCH, shuffle=self.setting.shuffle), DataLoader(test, BATCH)

    def round(self) -> None:
        """With aggregation."""
        with contextlib.redirect_stdout(io.StringIO()):
            self.running.train_round_fedavg(self.args, self.server, self.clients, 0)

    def weights(self) -> list[Tensor]:
        """Return the server's part."""
        return [p.detach() for p in self.server.parameters()]


class DPAuthors(HyperFLAuthors):
    """The same with their DP-FedAvg: a backward pass for every image of a batch, each clipped and added up.

    Raises:
        ValueError: their noise, which Opacus calibrates for 200 rounds at epsilon 4 and delta 1e-5, is not ours.
    """

    update = "LocalUpdate_DPFedAvg"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        for client in self.clients:
            if setting.silent:
                client.sigma = 0.0
            elif abs(client.sigma - NOISE) > 0.01 * NOISE:
                raise ValueError(f"expected noise of {NOISE} times the clip, as on our side, got {client.sigma}")


def _same_weights(model: nn.Module, like: nn.Module) -> nn.Module:
    with torch.no_grad():
        for own, other in zip(model.parameters(), like.parameters(), strict=True):
            if own.shape != other.shape:
                raise ValueError(f"expected layers of the same shapes, got {own.shape} and {other.shape}")
            own.copy_(other)
    return model
