"""One row per true image: matching, failures, floors, labels, private tensors, and JSON without NaN."""

import json
import math
from dataclasses import dataclass, field

import pytest
import torch

from eval.io.jsonl import read_rows, write_rows
from eval.metrics.image import psnr, ssim
from eval.metrics.perceptual import Unavailable
from eval.metrics.score import MEASURES, NO_IMAGES, NO_RECONSTRUCTION, private_errors, relative_error, score
from fl.tensors import LowRank, Term


@dataclass
class Guess:
    inputs: torch.Tensor | None
    labels: torch.Tensor | None = None
    objective: float = 0.5
    history: tuple = ()
    private: dict = field(default_factory=dict)
    seen: torch.Tensor | None = None
    remarks: frozenset = frozenset()


@dataclass
class Held:
    inputs: torch.Tensor
    labels: torch.Tensor
    private: dict = field(default_factory=dict)
    extractor: dict = field(default_factory=dict)


class Manhattan:
    """A stand-in for LPIPS with a value one can compute."""

    missing = None

    def name(self, height, width):
        return f"lpips_fake{height}x{width}"

    def __call__(self, a, b):
        return (a.clamp(0, 1) - b).abs().flatten(1).mean(1).double()


def images(count, seed=0, size=16, channels=3):
    return torch.rand(count, channels, size, size, generator=torch.Generator().manual_seed(seed))


def held(count=4, **kwargs):
    return Held(images(count, **kwargs), torch.arange(count))


def test_every_metric_follows_one_assignment():
    truth, order = held(), torch.tensor([2, 0, 3, 1])
    noise = 0.05 * torch.randn(truth.inputs.shape, generator=torch.Generator().manual_seed(1))
    guess = (truth.inputs + noise)[order]
    rows = score(Guess(guess, labels=order), truth, perceptual=Manhattan())
    assert [row["matched"] for row in rows] == order.argsort().tolist()
    assert [row["image"] for row in rows] == [0, 1, 2, 3]
    direct = truth.inputs + noise
    for name, measure in MEASURES.items():
        assert [row[name] for row in rows] == pytest.approx(measure(direct, truth.inputs).tolist(), abs=1e-12)
    expected = Manhattan()(direct, truth.inputs).tolist()
    assert [row["lpips_fake16x16"] for row in rows] == pytest.approx(expected, abs=1e-7)
    assert all(row["label_correct"] and row["label_overlap"] == 1 for row in rows)
    assert all(row["failure"] is None and not row["missing"] for row in rows)


def test_scores_do_not_depend_on_the_order_of_the_guesses():
    truth, guess = held(), images(4, seed=9)
    labels, order = torch.tensor([3, 1, 1, 0]), torch.tensor([3, 1, 0, 2])
    first = score(Guess(guess, labels), truth)
    second = score(Guess(guess[order], labels[order]), truth)
    for a, b in zip(first, second, strict=True):
        assert {**a, "matched": None} == {**b, "matched": None}
        assert order[b["matched"]] == a["matched"]


def test_scoring_changes_nothing_it_was_given():
    truth, guess = held(), images(4, seed=9) * 3 - 1
    before = truth.inputs.clone(), guess.clone()
    score(Guess(guess.requires_grad_(), torch.arange(4)), truth)
    assert torch.equal(truth.inputs, before[0])
    assert torch.equal(guess, before[1])


def test_exact_pixels_are_counted_after_rounding():
    truth = held()
    guess = truth.inputs + 0.1 / 255
    guess[2] = 1 - guess[2]
    truth.inputs = (truth.inputs * 255).round() / 255
    guess[0], guess[1] = truth.inputs[0] + 0.3 / 255, truth.inputs[1]
    assert [row["exact8"] for row in score(Guess(guess), truth)][:3] == [True, True, False]


def test_floors_are_scored_by_every_metric():
    truth, reference = held(), images(20, seed=5)
    rows = score(Guess(truth.inputs), truth, perceptual=Manhattan(), reference=reference, seed=3)
    constant = truth.inputs.mean((2, 3), keepdim=True).expand_as(truth.inputs)
    assert [row["floor_mean_psnr"] for row in rows] == pytest.approx(psnr(constant, truth.inputs).tolist(), abs=1e-6)
    assert [row["floor_mean_ssim"] for row in rows] == pytest.approx(ssim(constant, truth.inputs).tolist(), abs=1e-6)
    for guess in ("mean", "grey", "noise", "nearest"):
        assert all(row[f"floor_{guess}_{name}"] is not None for name in [*MEASURES, "lpips_fake16x16"] for row in rows)
    without = score(Guess(truth.inputs), truth, seed=4)
    assert "floor_nearest_psnr" not in without[0]
    assert without[0]["floor_noise_psnr"] != rows[0]["floor_noise_psnr"]
    assert without[0]["floor_mean_psnr"] == rows[0]["floor_mean_psnr"]


def test_missing_reconstructions_count_as_failures():
    truth = held()
    rows = score(Guess(truth.inputs[[3, 1]], torch.tensor([3, 1])), truth, perceptual=Manhattan())
    assert [row["failure"] for row in rows] == ["unmatched", None, "unmatched", None]
    for row in rows[::2]:
        assert (row["mse"], row["psnr"], row["ssim"], row["ssim_rog"], row["ssim_uniform7"]) == (1, 0, 0, 0, 0)
        assert row["exact8"] is row["label_correct"] is False
        assert row["lpips_fake16x16"] is None
        assert row["missing"] == {"lpips_fake16x16": NO_RECONSTRUCTION}
        assert row["floor_mean_psnr"] > 5
    assert [row["psnr"] for row in rows] == [0, 100, 0, 100]
    assert all((row["candidates"], row["images"], row["label_overlap"]) == (2, 4, 0.5) for row in rows)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_pixels_that_are_not_finite_fail_their_image_only(value):
    truth = held()
    guess = truth.inputs.clone()
    guess[1, 2, 3, 4] = value
    rows = score(Guess(guess, torch.arange(4)), truth)
    assert [row["failure"] for row in rows] == [None, "non-finite", None, None]
    assert [row["psnr"] for row in rows] == [100, 0, 100, 100]
    assert [row["label_correct"] for row in rows] == [True, False, True, True]
    everything = score(Guess(torch.full_like(guess, value)), truth)
    assert [row["psnr"] for row in everything] == [0] * 4


def test_surplus_reconstructions_are_recorded():
    truth = held(2)
    rows = score(Guess(torch.cat([images(3, seed=4), truth.inputs]), torch.tensor([9, 9, 9, 0, 1])), truth)
    assert [(row["matched"], row["candidates"], row["label_correct"]) for row in rows] == [(3, 5, True), (4, 5, True)]


def test_an_attack_without_images_has_no_figures_and_no_failures():
    truth = held()
    rows = score(Guess(None, torch.tensor([0, 0, 2])), truth, perceptual=Manhattan())
    for row in rows:
        assert row["failure"] is row["matched"] is row["psnr"] is row["exact8"] is row["label_correct"] is None
        assert row["missing"]["psnr"] == row["missing"]["lpips_fake16x16"] == NO_IMAGES
        assert row["label_overlap"] == 0.5
        assert row["floor_mean_psnr"] is not None


def test_labels_are_compared_image_by_image_and_as_a_bag():
    truth = held()
    rows = score(Guess(truth.inputs, torch.tensor([1, 0, 2, 2])), truth)
    assert [row["label_correct"] for row in rows] == [False, False, True, False]
    assert rows[0]["label_overlap"] == 0.75
    assert [row["label"] for row in rows] == [0, 1, 2, 3]
    none = score(Guess(truth.inputs), truth)[0]
    assert none["label_correct"] is none["label_overlap"] is None
    soft = Held(truth.inputs, torch.eye(4))
    assert all(row["label_correct"] for row in score(Guess(truth.inputs, 5 * torch.eye(4)), soft))


def test_small_images_and_unavailable_measures_say_why():
    truth = held(2, size=8)
    row = score(Guess(truth.inputs), truth, perceptual=Unavailable("alex", "no weights", "get some"))[0]
    assert row["ssim"] is None
    assert row["missing"]["ssim"] == "needs images of at least 11x11 pixels, got 8x8"
    assert row["ssim_uniform7"] == pytest.approx(1)
    assert row["lpips_alex@64"] is None
    assert row["missing"]["lpips_alex@64"] == "LPIPS not available: no weights; get some"
    assert "floor_mean_ssim" not in row
    assert "floor_mean_lpips_alex@64" not in row
    assert score(Guess(truth.inputs), truth)[0].keys() >= MEASURES.keys()


def test_other_channel_counts_lack_the_color_metrics():
    truth = held(2, channels=2)
    row = score(Guess(truth.inputs), truth, perceptual=Manhattan())[0]
    assert row["psnr"] == 100
    assert row["ssim_rog"] is row["lpips_fake16x16"] is None
    assert row["missing"]["ssim_rog"] == row["missing"]["lpips_fake16x16"] == "needs 1 or 3 channels, got 2"


def test_rows_survive_json_whatever_the_numbers(tmp_path):
    truth = held()
    truth.private = {"embedding": torch.zeros(3), "head": torch.ones(2)}
    private = {"embedding": torch.ones(3), "head": torch.full((2,), math.nan), "features": torch.ones(7)}
    guess = torch.full_like(truth.inputs, math.nan)
    rows = score(Guess(guess, objective=math.inf, private=private), truth, perceptual=Manhattan())
    write_rows(tmp_path / "rows.jsonl", rows)
    assert read_rows(tmp_path / "rows.jsonl") == rows == json.loads(json.dumps(rows, allow_nan=False))
    assert rows[0]["objective"] is None
    assert rows[0]["missing"]["objective"] == "not finite (inf)"
    assert rows[0]["private_errors"] == {"embedding": None, "head": None}
    assert rows[0]["missing"]["private_errors/embedding"] == "not finite (inf)"
    assert rows[0]["missing"]["private_errors/head"] == "not finite (nan)"


def test_private_errors_are_relative_and_by_name():
    true = {"embedding": torch.tensor([3.0, 4.0]), "zero": torch.zeros(2), "unseen": torch.ones(1)}
    recovered = {"embedding": torch.tensor([3.0, 4.5]), "zero": torch.zeros(2), "features": torch.ones(5)}
    assert private_errors(recovered, true) == {"embedding": pytest.approx(0.1), "zero": 0.0}
    small = {"embedding": true["embedding"] * 1e-20}
    assert private_errors({"embedding": small["embedding"] * 1.5}, small)["embedding"] == pytest.approx(0.5)
    with pytest.raises(ValueError, match=r"'embedding' of shape \(2,\), got \(1, 2\)"):
        private_errors({"embedding": torch.ones(1, 2)}, true)


def test_structured_tensors_are_compared_like_dense_ones():
    left, right = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0, 5.0]])
    structured = LowRank(None, 0.0, (Term(1.0, left, right),), (2, 3))
    assert relative_error({"w": structured}, {"w": left.T @ right}) == 0
    assert relative_error({"w": 1.1 * (left.T @ right)}, {"w": structured}) == pytest.approx(0.1)
    assert relative_error({"n": torch.tensor([3, 4])}, {"n": torch.tensor([3, 0])}) == pytest.approx(4 / 3)


def test_the_extractor_counts_whole():
    truth = held()
    truth.private = {"embedding": torch.ones(2)}
    truth.extractor = {"conv": torch.tensor([3.0]), "fc": torch.tensor([4.0])}
    private = {"embedding": torch.ones(2), "extractor/conv": torch.tensor([3.0]), "extractor/fc": torch.tensor([5.0])}
    row = score(Guess(truth.inputs, private=private), truth)[0]
    assert row["private_errors"] == {"embedding": 0, "extractor/conv": 0, "extractor/fc": 0.25}
    assert row["extractor_error"] == pytest.approx(0.2)
    del private["extractor/fc"]
    assert score(Guess(truth.inputs, private=private), truth)[0]["extractor_error"] is None


@pytest.mark.parametrize(
    ("guess", "truth", "message"),
    [
        (Guess(images(2, size=8)), held(2), "truth's shape"),
        (Guess(images(2), torch.arange(3)), held(2), "2 recovered labels"),
        (Guess(images(2)), Held(images(2), torch.arange(3)), "2 true labels"),
        (Guess(images(2)), Held(images(2) * 255, torch.arange(2)), "undo the normalization"),
        (Guess(images(2)), Held(images(2)[:0], torch.arange(0)), "at least one true image"),
    ],
)
def test_what_does_not_fit_is_refused(guess, truth, message):
    with pytest.raises(ValueError, match=message):
        score(guess, truth)


def test_clients_of_a_group_may_change_places():
    """As images may: the tensors of one client stay together, and none is matched to a client of other tensors."""
    generator = torch.Generator().manual_seed(0)
    private = {
        f"part/{i}/{name}": torch.randn(n, generator=generator) for i in range(3) for name, n in SIZES[i].items()
    }
    truth = Held(images(3), torch.arange(3), private, {f"part/{i}/w": torch.full((2,), i + 1.0) for i in range(2)})
    swapped = {0: 1, 1: 0, 2: 2}
    found = {f"part/{swapped[int(name[5])]}{name[6:]}": value for name, value in private.items()}
    found |= {f"extractor/part/{1 - i}/w": torch.full((2,), i + 1.0) for i in range(2)}
    (row, *_) = score(Guess(truth.inputs, private=found), truth)
    assert len(row["private_errors"]) == 7
    assert set(row["private_errors"].values()) == {0.0}
    assert row["extractor_error"] == 0
    mixed = {**private, "part/0/head": private["part/1/head"], "part/1/head": private["part/0/head"]}
    assert sum(score(Guess(truth.inputs, private=mixed), truth)[0]["private_errors"].values()) > 1


SIZES = [{"head": 4, "bias": 2}, {"head": 4, "bias": 2}, {"head": 5}]


def test_pixels_that_a_network_is_given_are_scored_by_themselves_beside_every_guess() -> None:
    true = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    seen = torch.zeros_like(true, dtype=torch.bool)
    seen[..., 4:12, 4:12] = True
    found = torch.where(seen, true + 0.01, 0.5)
    row = score(Guess(found.clamp(0, 1), seen=seen), Held(true, torch.arange(2)))[0]
    off = ((found.clamp(0, 1) - true)[0][seen[0]]).square().mean()
    assert (row["seen"], row["seen_numbers"]) == (0.25, int(seen[0].sum()))
    assert row["psnr_seen"] == pytest.approx(-10 * math.log10(off), abs=1e-4)
    assert row["psnr"] < row["psnr_seen"]
    gray = (0.5 - true)[0][seen[0]].square().mean()
    assert row["floor_grey_psnr_seen"] == pytest.approx(-10 * math.log10(gray), abs=1e-4)
    assert "psnr_seen" not in score(Guess(found.clamp(0, 1)), Held(true, torch.arange(2)))[0]
