"""Intervals against closed forms, against what they promise, and against what they must not depend on."""

import math

import numpy as np
import pytest
from scipy.stats import binom, binomtest
from support.cover import one_at_a_time

from benchmarks.reliability.intervals import FAMILIES, coverage
from eval.metrics import statistics
from eval.metrics.statistics import THRESHOLDS, mean_interval, median, paired_difference, psnr_of_mean_mse, success_rate

FEW = (6, 8, 16, 50)


def as_rows(array, column="psnr"):
    return [
        {"image": i, "seed": s, column: None if math.isnan(v) else float(v)}
        for i, runs in enumerate(array)
        for s, v in enumerate(runs)
    ]


def test_rows_and_arrays_give_the_same():
    array = np.random.default_rng(0).normal(20, 3, (8, 3))
    array[2, 1] = math.nan
    assert mean_interval(as_rows(array)) == mean_interval(array)
    assert success_rate(as_rows(array), 20) == success_rate(array, 20)
    assert median(as_rows(array)) == median(array) == np.nanmedian(array)


def test_the_interval_of_the_mean_has_the_width_theory_gives():
    values = np.random.default_rng(1).normal(20, 3, 400)
    found = mean_interval(values)
    half = 1.96 * values.std() / math.sqrt(len(values))
    assert found.value == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert found.high == pytest.approx(values.mean() + half, abs=0.1 * half)
    narrower = mean_interval(values, level=0.5)
    assert found.low < narrower.low < narrower.high < found.high


@one_at_a_time(name=[name for name, family in FAMILIES.items() if family.holds], number=FEW)
def test_the_interval_covers_the_truth_as_often_as_it_says(name, number):
    """93 % is asked for; 400 draws of a true 95 % fall below 92 % once in 400."""
    assert coverage(FAMILIES[name], number, draws=400, seed=0)[0] >= 0.92


def test_seeds_count_towards_coverage_as_parts_of_their_images():
    rng, covered = np.random.default_rng(2), 0
    for _ in range(400):
        found = mean_interval(rng.normal(20, 3, (8, 1)) + rng.normal(0, 2, (8, 3)))
        covered += found.low <= 20 <= found.high
    assert covered / 400 >= 0.92


def test_six_exact_images_do_not_promise_a_seventh():
    found = mean_interval(np.full(6, 100.0))
    assert (found.value, found.high) == (100, 100)
    assert found.low == pytest.approx(100 * 0.025 ** (1 / 6))
    gain = mean_interval([{"image": i, "gain": 88.0 + i} for i in range(6)], "gain")
    assert gain.low < 0.6 * gain.value


def test_an_interval_stays_inside_the_range_of_its_column():
    found = mean_interval(np.array([1.0, 99.0]))
    assert (found.low, found.high) == (0, 100)
    assert mean_interval(np.array([-300.0, 300.0])).low < -300  # not decibels


def test_seeds_of_one_image_do_not_count_as_images():
    images = np.random.default_rng(3).normal(20, 3, (10, 1))
    one, many = mean_interval(images), mean_interval(np.repeat(images, 50, axis=1))
    assert (many.images, many.count) == (10, 500)
    assert many.high - many.low == pytest.approx(one.high - one.low, rel=0.1)


def test_seeds_widen_the_interval_where_they_disagree():
    rng = np.random.default_rng(3)
    calm, noisy = (20 + rng.normal(0, spread, (6, 2)) for spread in (0.5, 5.0))
    widths = [found.high - found.low for found in map(mean_interval, (calm, noisy))]
    assert widths[1] > 3 * widths[0]


def test_images_weigh_alike_however_many_seeds_they_have():
    rows = [{"image": 0, "seed": s, "psnr": 10.0} for s in range(9)] + [{"image": 1, "seed": 0, "psnr": 30.0}]
    found = mean_interval(rows)
    assert found.value == 20
    assert (found.low, found.high) == (0, 100)  # two images tell next to nothing


def test_intervals_draw_no_random_numbers():
    values = np.random.default_rng(4).normal(20, 3, 20)
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    assert mean_interval(values) == mean_interval(values)
    assert (np.random.get_state()[1] == state).all()  # noqa: NPY002


def test_missing_figures_are_left_out_and_counted():
    rows = as_rows(np.array([[20.0, math.nan], [math.nan, math.nan], [30.0, 30.0]]))
    found = mean_interval(rows)
    assert (found.value, found.images, found.count, found.missing) == (25, 2, 3, 3)
    assert success_rate(rows, 25).images == 2


def test_one_image_has_no_interval():
    found = mean_interval(np.array([[20.0, 22.0]]))
    assert (found.value, found.low, found.high) == (21, None, None)


def test_paired_differences_ignore_what_the_images_have_in_common():
    rng = np.random.default_rng(5)
    common = rng.normal(20, 10, (20, 1)) + rng.normal(0, 1, (20, 2))
    first, second = common + 0.5 + rng.normal(0, 0.1, common.shape), common
    found = paired_difference(first, second)
    assert 0.4 < found.low < found.value < found.high < 0.6
    assert mean_interval(first).low < mean_interval(second).high
    shuffled = [as_rows(second)[i] for i in rng.permutation(40)]
    assert paired_difference(as_rows(first), shuffled) == found
    assert paired_difference(second, first).value == pytest.approx(-found.value)


def test_pairs_must_match_one_to_one():
    rows = as_rows(np.full((3, 2), 20.0))
    with pytest.raises(ValueError, match="6 and 5"):
        paired_difference(rows, rows[:-1])
    with pytest.raises(ValueError, match="same"):
        paired_difference(rows, [{**row, "image": row["image"] + 1} for row in rows])
    with pytest.raises(ValueError, match="got two"):
        paired_difference(rows, [*rows, rows[0]])


def test_a_pair_with_a_missing_side_is_left_out():
    found = paired_difference(np.array([3.0, math.nan, 5.0]), np.array([1.0, 1.0, math.nan]))
    assert (found.value, found.count, found.missing) == (2, 1, 2)


@pytest.mark.parametrize(("hits", "count"), [(0, 8), (1, 8), (7, 8), (8, 8), (30, 96)])
@pytest.mark.parametrize("level", [0.9, 0.95])
def test_success_rates_have_clopper_and_pearsons_interval(hits, count, level):
    values = np.where(np.arange(count) < hits, 25.0, 24.999)
    found = success_rate(values, 25, level=level)
    expected = binomtest(hits, count).proportion_ci(level, method="exact")
    assert found.value == hits / count
    assert found.low == pytest.approx(expected.low, abs=1e-9)
    assert found.high == pytest.approx(expected.high, abs=1e-9)


def test_seeds_of_an_image_are_no_trials_of_their_own():
    once = success_rate(np.array([25.0, 25, 25, 10]), 20)
    thrice = success_rate(np.array([[25.0] * 3] * 3 + [[10.0] * 3]), 20)
    assert (once.value, once.low, once.high) == (thrice.value, thrice.low, thrice.high)


def test_success_falls_with_the_threshold():
    values = np.linspace(10, 40, 31)
    rates = [success_rate(values, threshold).value for threshold in THRESHOLDS]
    assert rates == [21 / 31, 16 / 31, 11 / 31]


def test_three_ways_to_average_decibels():
    mse = np.array([1e-10, 1e-2, 1e-2, 1e-2])  # one exact of four
    decibels = -10 * np.log10(mse)
    assert mean_interval(decibels).value == pytest.approx(40)
    assert median(decibels) == pytest.approx(20)
    assert psnr_of_mean_mse(mse) == pytest.approx(21.249, abs=1e-3)
    assert psnr_of_mean_mse(np.zeros(3)) == 100
    assert psnr_of_mean_mse([{"image": 0, "mse": 0.1}, {"image": 1, "mse": None}]) == pytest.approx(10)


@pytest.mark.parametrize("data", [[], np.array([]), np.array([math.nan]), np.array([math.inf, 1.0])])
def test_nothing_to_average_is_an_error(data):
    with pytest.raises(ValueError, match="at least one figure"):
        mean_interval(data)


@pytest.mark.parametrize(("kwargs", "message"), [({"level": 1.0}, "level"), ({"level": 0.0}, "level")])
def test_settings_out_of_range_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        mean_interval(np.arange(3.0), **kwargs)


def test_unknown_columns_are_named():
    with pytest.raises(ValueError, match="'ssim'"):
        mean_interval([{"image": 0, "psnr": 1.0}], "ssim")
    with pytest.raises(ValueError, match="shape"):
        mean_interval(np.zeros((2, 2, 2)))


def test_rates_are_bounded_by_clopper_and_pearson() -> None:
    assert statistics.rate_upper_bound(0, 100, 0.05) == pytest.approx(1 - 0.05 ** (1 / 100))
    assert statistics.rate_lower_bound(100, 100, 0.05) == pytest.approx(0.05 ** (1 / 100))
    assert (statistics.rate_upper_bound(5, 5, 0.05), statistics.rate_lower_bound(0, 5, 0.05)) == (1.0, 0.0)
    low, high = statistics.exact_interval(7, 20)
    assert binom.sf(6, 20, low) == pytest.approx(0.025)
    assert binom.cdf(7, 20, high) == pytest.approx(0.025)
    with pytest.raises(ValueError, match="successes <= trials"):
        statistics.exact_interval(3, 2)


def test_an_interval_of_accuracies_ends_where_accuracies_end():
    rows = [{"image": number, "accuracy": value} for number, value in enumerate([1.0, 1.0, 0.4])]
    found = mean_interval(rows, "accuracy")
    assert found.high == 1.0
    assert found.low == 0.0
    assert mean_interval([1.0, 1.0, 0.4], "other").high > 1.0


@pytest.mark.parametrize(
    ("column", "values", "low", "high"),
    [
        ("floor_mean_psnr", [9.0, 18.0], 0.0, None),
        ("floor_nearest_psnr", [30.0, 95.0], 0.0, 100.0),
        ("floor_grey_ssim", [-0.9, 0.9], -1.0, 1.0),
        ("lpips_squeeze@64", [0.01, 0.3], 0.0, None),
        ("floor_mean_lpips_squeeze@64", [0.01, 0.3], 0.0, None),
    ],
)
def test_intervals_of_guesses_and_of_lpips_stay_in_their_range(column, values, low, high):
    found = mean_interval([{"image": i, column: value} for i, value in enumerate(values)], column)
    assert found.low == low
    assert high is None or found.high == high
