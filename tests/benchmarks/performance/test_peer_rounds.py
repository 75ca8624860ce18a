"""What stands around the peers' code in `peer_rounds`: the comparison with ours, and what is published."""

import pytest
import torch

from benchmarks.peers import rounds
from benchmarks.peers.rounds import Setting, Trainer
from benchmarks.peers.sources import SITE, VARIABLE, PeerMissingError, importable
from benchmarks.performance import peer_rounds
from benchmarks.performance.noise_data import BATCH
from benchmarks.performance.peer_rounds import DP, FEDAVG, THEIRS, Figures

QUIET = Setting("hyperfl-grey", epochs=1, shuffle=False, silent=True)


class ByHand(Trainer):
    """Local SGD by torch.optim, as a peer would do it."""

    lr = rounds.LR

    def __init__(self, setting):
        super().__init__(setting)
        self.model = setting.plain_model

    def round(self):
        settings = {"momentum": rounds.MOMENTUM, "weight_decay": rounds.DECAY}
        optimizer = torch.optim.SGD(self.model.parameters(), self.lr, **settings)
        (own,) = self.setting.data()
        for _ in range(self.setting.epochs):
            for inputs, labels in zip(own.inputs.split(BATCH), own.labels.split(BATCH), strict=True):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(self.model(inputs), labels).backward()
                optimizer.step()

    def weights(self):
        return [p.detach() for p in self.model.parameters()]


class Slower(ByHand):
    lr = 0.99 * rounds.LR


class Broken(ByHand):
    def weights(self):
        return [torch.full_like(p, float("nan")) for p in super().weights()]


def test_ours_does_the_work_that_peers_are_asked_for():
    assert peer_rounds.same_work("by hand", ByHand(QUIET), rounds.fedavg(QUIET)) < 1e-4


@pytest.mark.parametrize("other", [Slower, Broken])
def test_other_work_is_refused(other):
    with pytest.raises(ValueError, match=r"other ends .* expected the same work"):
        peer_rounds.same_work("other", other(QUIET), rounds.fedavg(QUIET))


def test_private_rounds_are_those_of_the_authors_settings():
    silent, noisy = (rounds.dp_fedavg(Setting("hyperfl-grey", silent=s)).run.client.method for s in (True, False))
    assert (silent.sigma, noisy.sigma) == (0.0, rounds.NOISE)
    assert noisy.denominator() is None  # the size of the batch, as there
    assert noisy.phases(QUIET.task, 0)[0].sampler == "shuffle"


@pytest.mark.parametrize("name", THEIRS)
def test_absent_peers_are_left_out_and_said_to_be(name, monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    peer, base = THEIRS[name]
    with pytest.raises(PeerMissingError):
        peer(QUIET)
    seconds = {FEDAVG: [1.0, 2.0], DP: [3.0, 4.0]}
    text = "\n".join(peer_rounds.page({"n": Figures(seconds, {}, dict.fromkeys(THEIRS, "get it"))}, 2))
    assert f"| n | {name} | not run |" in text
    assert f"{name} was not run: get it" in text
    assert peer.source.get in text
    assert peer.changes in text
    assert str(tmp_path) not in "\n".join(peer_rounds.how())
    assert base in seconds


def test_ratios_are_taken_turn_by_turn():
    seconds = {FEDAVG: [1.0, 2.0, 4.0], DP: [2.0, 6.0, 8.0], "FedAvg, PFLlib": [3.0, 5.0, 4.0]}
    lines = peer_rounds.lines_of("n", Figures(seconds, {"FedAvg, PFLlib": 2e-6}, dict.fromkeys(THEIRS, "absent")))
    assert lines[1][:4] == ["n", DP, "6.00 [2.00, 8.00]", f"2.00 [2.00, 3.00] of {FEDAVG}"]
    there = Figures(seconds, {"FedAvg, PFLlib": 2e-6}, {k: "absent" for k in THEIRS if k != "FedAvg, PFLlib"})
    assert peer_rounds.lines_of("n", there)[2][2:] == [
        "4.00 [3.00, 5.00]",
        f"2.50 [1.00, 3.00] of {FEDAVG}",
        "2e-06",
    ]


def test_packages_inside_a_repository_are_found(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.path", ["first"])
    importable(tmp_path / "code", "system")
    importable(tmp_path / "code", "system")
    importable(tmp_path / "other")
    paths = [tmp_path / "code" / "system", tmp_path / SITE, tmp_path / "other"]
    assert peer_rounds.sys.path == ["first", *map(str, paths)]
