"""Each flag appears when it should and only then."""

import math
from types import SimpleNamespace

import pytest
import torch

from eval.metrics.perceptual import Unavailable
from eval.metrics.score import score
from eval.metrics.validity_flags import FLAGS, find_flags


def rows(guess, count=2, size=16, perceptual=None, objective=0.1):
    """Rows of a batch of smooth images, reconstructed by `guess(truth)`."""
    ramp = torch.linspace(0, 1, size).expand(count, 3, size, size)
    truth = SimpleNamespace(inputs=ramp.clone(), labels=torch.arange(count), private={}, extractor={})
    found = guess(ramp.clone())
    made = SimpleNamespace(inputs=found, labels=None, objective=objective, private={}, seen=None, remarks=())
    return score(made, truth, perceptual=perceptual)


def broken(truth):
    truth[0, 0, 0, 0] = math.nan
    return truth


def good(truth):
    return truth


def test_a_good_attack_has_no_flags():
    assert find_flags(rows(good), histories=[(1.0, 0.5, 0.1)], forward_error=1e-7) == []


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("non-finite", lambda: find_flags(rows(broken))),
        ("non-finite", lambda: find_flags(rows(good), histories=[(1.0, 0.5, math.nan)])),
        ("non-finite", lambda: find_flags(rows(good, objective=math.inf), histories=[(1.0, 0.5)])),
        ("unmatched", lambda: find_flags(rows(lambda x: x[:1]))),
        ("extra-candidates", lambda: find_flags(rows(lambda x: torch.cat([x, x])))),
        ("objective-never-improved", lambda: find_flags(rows(good), histories=[(1.0, 0.5), (1.0, 1.0, 2.0)])),
        ("below-floor", lambda: find_flags(rows(lambda x: 1 - x))),
        ("labels-given", lambda: find_flags(rows(good), labels_given=True)),
        ("defense-known", lambda: find_flags(rows(good), defense_known=True)),
        ("changed-pictures", lambda: find_flags([{**row, "changed_by": "mixup"} for row in rows(good)])),
        ("forward-mismatch", lambda: find_flags(rows(good), forward_error=0.1)),
        ("forward-mismatch", lambda: find_flags(rows(good), forward_error=math.nan)),
        ("single-image", lambda: find_flags(rows(good, count=1) * 3)),
        ("single-image", lambda: find_flags([rows(good)[0], rows(good)[1] | {"copy_of": 0}])),
        ("lpips-missing", lambda: find_flags(rows(good, perceptual=Unavailable("alex", "no", "do")))),
        ("lpips-missing", lambda: find_flags(rows(lambda x: x[:0], perceptual=Unavailable("alex", "no", "do")))),
        ("ssim-missing", lambda: find_flags(rows(good, size=8))),
    ],
)
def test_each_flag_is_raised_by_its_fault(name, found):
    assert name in FLAGS
    assert name in found()


def test_what_is_no_fault_raises_no_flag():
    assert find_flags(rows(lambda x: x.mul(0) + 0.5)) == []  # exactly at the floor
    assert find_flags(rows(good, objective=math.nan), histories=[()]) == []  # an analytic attack has no objective
    assert find_flags(rows(lambda _x: None)) == []  # an attack that is not after images
    assert find_flags(rows(good), histories=[(1.0, 2.0, 0.9)]) == []


def test_flags_come_in_their_listed_order_and_are_explained():
    found = find_flags(rows(lambda x: 1 - x, count=1, size=8), labels_given=True, histories=[(1.0, 1.0)])
    assert found == ["objective-never-improved", "below-floor", "labels-given", "single-image", "ssim-missing"]
    assert found == [name for name in FLAGS if name in found]
    assert all(text.endswith(".") and len(text.split()) > 5 for text in FLAGS.values())


def test_images_of_several_batches_are_told_apart_by_their_column():
    several = [{**row, "picture": i} for i, row in enumerate(rows(good, count=1) * 2)]
    assert find_flags(several) == ["single-image"]
    assert find_flags(several, image="picture") == []


def test_no_rows_is_an_error():
    with pytest.raises(ValueError, match="at least one row"):
        find_flags([])
