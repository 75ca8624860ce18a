"""What counts as leaked: no more than public images tell, no copies, no blends for pictures, nothing of flat ones."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import hyperleak
from eval.audit.judgment import Judgment
from eval.audit.verdict import FLAT_FROM, best_baseline, has_leaked, image_verdict
from eval.metrics.baselines import mean_images
from eval.metrics.image import psnr
from eval.metrics.own_pictures import add_own_pictures
from eval.metrics.score import score
from eval.report.result_groups import ResultGroup
from fl.types import Batch


def network(act=nn.Sigmoid):
    torch.random.default_generator.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), act(), nn.Linear(16, 4))


def pictures(count, seed=0):
    """Bright disks of a few pixels more or less: their mean shows more of each than one color does."""
    draw = torch.Generator().manual_seed(seed)
    shape = torch.zeros(1, 1, 8, 8)
    shape[..., 2:6, 2:6] = 0.8
    return (shape + 0.2 * torch.rand(count, 1, 8, 8, generator=draw)).clamp(0, 1)


class Found:
    """What an attack hands back that knows public images alone."""

    labels, objective, seen, remarks, private = None, float("nan"), None, (), {}

    def __init__(self, inputs):
        self.inputs = inputs


@pytest.mark.parametrize("known", [True, False])
def test_the_mean_of_public_images_shows_nothing_of_the_update(known):
    public = Batch(pictures(40, seed=1), torch.zeros(40, dtype=torch.int64))
    guess, rows = public.inputs.mean(0, keepdim=True), []
    for number, image in enumerate(pictures(8)):
        truth = SimpleNamespace(inputs=image[None], labels=torch.tensor([0]), private={}, extractor={})
        means = mean_images(public) if known else None
        found = score(Found(guess), truth, public=means)
        rows += [{**row, "picture": str(number), "update": number, "seed": 0} for row in found]
    assert has_leaked(rows) is not known
    group = ResultGroup("", "", "", 0, tuple(rows))
    assert group.best_baseline[0] == ("public" if known else "mean")


def test_attacks_that_have_public_images_are_held_against_their_mean():
    attack = {"name": "lti", "auxiliary": {"name": "faces", "size": 8}, "iterations": 1, "width": 8}
    report = hyperleak.audit(network(), pictures(1), torch.tensor([1]), attacks=[attack, "analytic"])
    assert ["floor_public_psnr" in found.rows[0] for found in report.findings] == [True, False]


def test_a_trained_attack_is_not_said_to_have_diverged():
    attack = {"name": "lti", "auxiliary": {"name": "faces", "size": 8}, "iterations": 3, "width": 8}
    (found,) = hyperleak.audit(network(), pictures(1), torch.tensor([1]), attacks=[attack]).findings
    assert found.rows[0]["objective"] == found.rows[0]["history"][-1]
    assert "non-finite" not in found.flags


def test_copies_of_an_image_count_as_one():
    images, labels = pictures(1).repeat(7, 1, 1, 1), torch.ones(7, dtype=torch.int64)
    report = hyperleak.audit(
        network(), images, labels, attacks=[{"name": "ig", "iterations": 20}], defense={"name": "noise", "std": 0.3}
    )
    (found,) = report.findings
    assert not any(row["psnr"] >= 20 for row in found.rows)
    assert all(row["psnr"] > row["floor_mean_psnr"] + 1 for row in found.rows)
    assert not found.leaked
    assert found.too_few_images == 1
    assert "single-image" in found.flags
    assert "images that equal others (6) count once: 1 in all" in found.verdict


def test_copies_widen_no_interval_and_narrow_none():
    values = [10.0, 12.0, 17.0]
    rows = [{"picture": str(i), "seed": 0, "psnr": x, "update": i} for i, x in enumerate(values)]
    copied = [*rows, *({**rows[0], "picture": f"c{i}", "copy_of": "0", "update": 9 + i} for i in range(5))]
    one, other = (ResultGroup("", "", "", 0, tuple(x)).psnr for x in (rows, copied))
    assert (one.value, one.low, one.high, one.images) == (other.value, other.low, other.high, other.images)


@pytest.mark.parametrize("defense", ["mixup", "instahide", ["clip", "mixup"]])
def test_blends_that_come_back_are_not_called_the_clients_pictures(defense):
    images, labels = pictures(2), torch.tensor([0, 1])
    report = hyperleak.audit(network(nn.ReLU), images, labels, attacks=["analytic"], defense=defense)
    (found,) = report.findings
    assert found.leaked
    assert "changed-pictures" in found.flags
    name = defense if isinstance(defense, str) else "mixup"
    assert f"image content leaked (of the pictures as {name} changed them, not of the client's own, " in found.verdict
    assert all(f"as {name} changed them" in leak.words for leak in Judgment(report).leaks)


def test_blends_are_held_against_the_clients_own_pictures_as_well():
    own = torch.stack([pictures(1)[0], 1 - pictures(1)[0]])
    fed = torch.stack([0.6 * own[0] + 0.4 * own[1], 0.3 * own[0] + 0.7 * own[1]])
    truth = SimpleNamespace(inputs=fed, labels=torch.tensor([0, 1]), private={}, extractor={})
    rows = add_own_pictures(score(Found(fed.flip(0)), truth), fed.flip(0), own, seed=0)
    away = (own[0] - own[1]).square().mean()
    expected = [-10 * torch.log10(share**2 * away).item() for share in (0.4, 0.3)]
    assert [row["psnr_own"] for row in rows] == pytest.approx(expected, abs=1e-3)
    assert all(row["psnr"] == 100 for row in rows)
    guessed = psnr(own.mean((2, 3), keepdim=True).expand_as(own), own).tolist()
    assert [row["floor_mean_psnr_own"] for row in rows] == pytest.approx(guessed)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_what_came_back_of_the_clients_own_pictures_is_said(batch_size):
    images, labels = pictures(2), torch.tensor([0, 1])
    attack = {"name": "ig", "iterations": 3}
    report = hyperleak.audit(network(), images, labels, attacks=[attack], defense="instahide", batch_size=batch_size)
    (found,) = report.findings
    best = max(found.rows, key=lambda row: row["psnr_own"] - best_baseline(row, "psnr_own"))
    said = f"not of the client's own, which came back at {best['psnr_own']:.1f} dB at best against "
    assert said in found.verdict


def test_a_picture_that_was_blended_with_itself_came_back_as_the_clients_own():
    report = hyperleak.audit(network(nn.ReLU), pictures(1), torch.tensor([1]), attacks=["analytic"], defense="mixup")
    (found,) = report.findings
    (row,) = found.rows
    assert row["psnr_own"] == pytest.approx(row["psnr"])
    assert row["floor_mean_psnr_own"] == pytest.approx(row["floor_mean_psnr"])
    assert "not of the client's own, which came back at" in found.verdict


def test_blends_are_named_where_the_attacker_does_not_know_the_defense():
    settings = {"defense": "mixup", "threat": {"knows_defense": False}}
    report = hyperleak.audit(network(nn.ReLU), pictures(2), torch.tensor([0, 1]), attacks=["analytic"], **settings)
    assert "changed-pictures" in report.findings[0].flags
    assert "as mixup changed them" in report.findings[0].verdict


def test_a_defense_that_leaves_pictures_as_they_are_has_no_such_words():
    report = hyperleak.audit(network(), pictures(1), torch.tensor([1]), attacks=["analytic"], defense="clip")
    assert "changed" not in report.findings[0].verdict
    assert "changed-pictures" not in report.findings[0].flags


@pytest.mark.parametrize("level", [0.0, 0.5, 1.0])
def test_flat_images_decide_nothing(level):
    images = torch.full((2, 1, 8, 8), level)
    report = hyperleak.audit(network(), images, torch.tensor([0, 1]), attacks=["analytic"])
    (question,) = Judgment(report).undecided
    assert "all images are of one color, or nearly" in question.why
    assert Judgment(report, {"psnr": 20.0}).above == ["psnr"]  # a limit is of the figure alone
    with pytest.raises(AssertionError, match="not decided"):
        hyperleak.assert_no_leak(network(), images, torch.tensor([0, 1]), attacks=["analytic"])


def test_images_that_are_nearly_flat_leak_where_they_come_back_exactly():
    images = 0.5 + 0.005 * (pictures(1) - 0.5)
    report = hyperleak.audit(network(), images, torch.tensor([0]), attacks=["analytic"])
    assert all(row["floor_mean_psnr"] >= FLAT_FROM for row in report.findings[0].rows)
    assert report.findings[0].leaked
    assert not Judgment(report).undecided


def test_one_image_that_shows_something_decides():
    images = torch.cat([torch.zeros(1, 1, 8, 8), pictures(1)])
    report = hyperleak.audit(network(), images, torch.tensor([0, 1]), attacks=["analytic"])
    assert report.findings[0].leaked
    assert not Judgment(report).undecided


def test_a_network_that_is_given_no_pixel_is_audited():
    model = network(nn.ReLU)
    model[1].bias.data.fill_(-100)  # no unit is active, so the picture changes nothing
    report = hyperleak.audit(model, pictures(1), torch.tensor([1]), attacks=[{"name": "ig", "iterations": 3}])
    assert not report.findings[0].failed
    assert not report.findings[0].leaked
    assert image_verdict(report.findings[0].rows).startswith("no") or "too few" in report.findings[0].verdict


def test_copies_with_labels_of_their_own_have_these_recovered():
    images, labels = pictures(1).repeat(2, 1, 1, 1), torch.tensor([1, 2])
    for told in ([1, 2], [2, 1]):
        found = Found(images + torch.tensor([0.0, 1e-3]).view(2, 1, 1, 1))
        found.labels = torch.tensor(told)
        rows = score(found, SimpleNamespace(inputs=images, labels=labels, private={}, extractor={}))
        assert [row["label_correct"] for row in rows] == [True, True]
    found.labels = torch.tensor([2, 3])
    rows = score(found, SimpleNamespace(inputs=images, labels=labels, private={}, extractor={}))
    assert [row["label_correct"] for row in rows] == [False, True]
