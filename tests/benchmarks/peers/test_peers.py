"""What stands around the peers' code in `benchmarks.peers`: finding it, running scripts of it, comparing."""

import itertools
import statistics

import pytest
import torch

from benchmarks.peers import report, speed
from benchmarks.peers.adapters import PEERS, Run, starting
from benchmarks.peers.compare import ALONE, STACKED, Case, Figures, Outcome, find_peers, summed
from benchmarks.peers.sources import IDLG, VARIABLE, PeerMissingError, execute
from benchmarks.peers.victims import network, victims
from fl.seeds import stream
from fl.types import Batch

SCRIPT = """
import a_library_that_is_not_there as helper
from another_one import first, second
import math

def main():
    rounds = 1000
    found = []
    for kind in ["one", "two"]:
        print("a picture that is not wanted", undefined)
        found.append((kind, rounds, first, second(math.floor(2.5))))
    return helper, found
"""
GIVEN = {"helper": "own", "first": 1, "second": lambda x: 2 * x}


@pytest.mark.parametrize("name", PEERS)
def test_absent_peers_say_how_to_get_them(name, monkeypatch, tmp_path):
    monkeypatch.delenv(VARIABLE, raising=False)
    source, _ = PEERS[name]
    with pytest.raises(PeerMissingError, match=f"set {VARIABLE}.*{source.get.split()[0]}"):
        source.find()
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(PeerMissingError) as error:
        source.find()
    assert source.get in str(error.value)
    assert str(tmp_path) not in str(error.value)  # it is published
    there, missing = find_peers([name], setting=None)
    assert not there
    assert source.get in missing[name]


def test_another_version_is_named(monkeypatch, tmp_path):
    path = tmp_path / IDLG.folder / IDLG.file
    path.parent.mkdir()
    path.write_text("changed")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert IDLG.find() == path.parent
    assert IDLG.version().startswith("another one")


def test_a_script_runs_with_other_names_and_constants(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    names = execute(path, GIVEN, {"rounds": 3, "kind": ["two"]})
    assert names["main"]() == ("own", [("two", 3, 1, 4)])
    assert path.read_text() == SCRIPT


def test_a_script_without_the_constant_is_refused(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    with pytest.raises(ValueError, match=r"script.py to assign steps"):
        execute(path, GIVEN, {"steps": 3})


def test_peers_start_where_ours_does():
    before = torch.get_rng_state()
    with starting(stream(3, "attack", 0)):
        drawn = torch.randn(1, 1, 3, 4, 5)
    assert torch.equal(drawn[0], torch.randn(1, 3, 4, 5, generator=stream(3, "attack", 0)))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_gradient_handed_over_is_the_views_update():
    task = network("lenet-zhu", 10, {"input_shape": (1, 28, 28)})
    images = Batch(torch.rand(2, 1, 28, 28, generator=stream(0, "images")), torch.tensor([3, 5]))
    both = victims(task, images, knows_labels=True)
    for victim, image, label in zip(both, images.inputs, images.labels, strict=True):
        task.model.zero_grad()
        torch.nn.functional.cross_entropy(task.model(image[None]), label[None]).backward()
        for (name, parameter), sent in zip(task.model.named_parameters(), victim.gradient, strict=True):
            assert torch.equal(parameter.grad, sent)
            assert torch.equal(victim.view.update[name], sent)
        assert victim.view.labels.tolist() == [int(label)]


def test_median_difference_is_that_of_the_pairs():
    ours, theirs = [30.0, 10.0, 22.0, 15.0, 18.0], [20.0, 11.0, 20.0, 14.0, 18.5]
    gaps = [a - b for a, b in zip(ours, theirs, strict=True)]
    middle, low, high = report.median_difference(ours, theirs)
    assert middle == statistics.median(gaps) == 1.0
    medians = sorted(statistics.median(drawn) for drawn in itertools.product(gaps, repeat=5))
    # 5 values: the bootstrap takes few different medians, and its ends are those of all 3125 samples
    assert (low, high) == (medians[int(0.025 * 3125)], medians[int(0.975 * 3125)])


def test_broken_images_count_as_gray():
    image = torch.rand(1, 1, 8, 8, generator=stream(1, "image"))

    class Victim:
        pass

    victim = Victim()
    victim.image = image
    lost = torch.full_like(image, float("nan"))
    figures = summed([Run(lost, 5, 2.0), Run(image, 7, 1.0)], [victim, victim])
    gray = -10 * torch.log10((image.double() - 0.5).square().mean())
    assert figures.psnr == pytest.approx([float(gray), 100.0])
    assert figures.broken == 1
    assert figures.rate == 12 / 3.0


def test_the_page_says_what_was_not_run():
    figures = Figures([20.0, 30.0], [3, 3], [1.0, 1.0], 0)
    case = Case(title="t", peers=("iDLG",), dataset="cifar10", network="n", ours="idlg", iterations=3, moves=3)
    outcome = Outcome([10.0, 10.0], {ALONE: figures, STACKED: figures}, {"iDLG": IDLG.get}, 2)
    text = "\n".join(report.page(2, [(case, outcome)]))
    assert f"iDLG was not run: {IDLG.get}" in text
    assert "ours minus theirs" not in text
    better = Figures([21.0, 29.0], [3, 3], [2.0, 2.0], 0)
    outcome = Outcome([10.0, 10.0], {"iDLG": figures, ALONE: better, STACKED: figures}, {}, 2)
    lines = [line for line in report.section(case, outcome) if line.startswith(f"| {ALONE}: iDLG")]
    assert "1 / 1 of 2 | 0.50x" in lines[0]


def test_speeds_are_ratios_to_each_peer_that_is_there():
    case = Case(title="t", peers=("iDLG", "ROG"), dataset="cifar10", network="n", ours="ig", iterations=3, moves=3)
    speeds = speed.Speeds({"iDLG": 100.0}, alone=110.0, compiled=190.0, stacked=420.0, missing={"ROG": "get it"})
    text = "\n".join(speed.page([(case, speeds)]))
    assert "| n | iDLG | 100 | 110 (1.1x) | 190 (1.9x) | 420 (4.2x) |" in text
    assert "| n | ROG | not run: get it | 110 | 190 | 420 |" in text
