import pytest
import torch

from attacks.base import Reconstruction
from eval.audit.verdict import column_verdict, exact_match_rate
from eval.metrics.score import score
from eval.metrics.tables import TOLERANCE, table_scores
from fl.capture import from_batch
from fl.inputs.description import describe_inputs

ROW = torch.tensor([[2.0, -1.0, 0.0, 1.0, 0.0, 1.0, 0.0]])  # two numbers, categories of three and of two


def form(**settings):
    return describe_inputs(ROW, input_range=(-4, 4), categories=[(2, 5), (5, 7)], **settings)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, (1.0, 1.0, 1.0)),
        ({0: 2.0 + TOLERANCE - 0.01}, (1.0, 1.0, 1.0)),
        ({0: 2.0 + TOLERANCE + 0.01}, (0.75, 1.0, 0.5)),
        ({2: 0.6, 3: 0.4}, (0.75, 0.5, 1.0)),
        ({3: 0.4, 4: 0.3}, (1.0, 1.0, 1.0)),
    ],
)
def test_categories_count_once_and_numbers_within_a_share_of_their_deviation(change, expected):
    own = form(column_std=[1.0] * 7)
    found = ROW.clone()
    for column, value in change.items():
        found[0, column] = value
    (scores,) = table_scores(own.pack(found, torch.float64), own.pack(ROW, torch.float64), own)
    assert (scores["row_accuracy"], scores["categories_right"], scores["numbers_right"]) == pytest.approx(expected)
    assert scores["exact_match"] == float(expected[0] == 1)


def test_without_a_deviation_that_of_equal_chance_in_the_range_counts():
    own, off = form(), TOLERANCE * 8 / 12**0.5
    for factor, right in ((0.99, 1.0), (1.01, 0.5)):
        found = ROW.clone()
        found[0, 0] += factor * off
        (scores,) = table_scores(own.pack(found, torch.float64), own.pack(ROW, torch.float64), own)
        assert scores["numbers_right"] == right


def test_the_exact_match_rate_is_the_share_of_rows_right_in_all_columns():
    true = ROW.repeat(2, 1)
    own = form(column_std=[1.0] * 7)
    found = true.clone()
    found[1, 1] += 1.0  # three of four columns right
    scores = table_scores(own.pack(found, torch.float64), own.pack(true, torch.float64), own)
    assert [one["exact_match"] for one in scores] == [1.0, 0.0]
    assert exact_match_rate(scores) == 0.5
    assert sum(one["row_accuracy"] for one in scores) / 2 == 0.875
    assert exact_match_rate([{"psnr": 20.0}]) is None


def test_a_row_for_which_nothing_came_back_counts_as_wrong():
    rows = torch.cat([ROW, torch.tensor([[-2.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0]])])
    settings = {"input_range": (-4, 4), "categories": [(2, 5), (5, 7)]}
    view, truth = from_batch(torch.nn.Linear(7, 2), rows, torch.tensor([1, 0]), **settings)
    scored = score(Reconstruction(truth.inputs[:1], truth.labels[:1]), truth, task=view.task)
    assert [(row["row_accuracy"], row["exact_match"]) for row in scored] == [(1.0, 1.0), (0.0, 0.0)]
    assert "1 of 2 row(s) right in all columns (exact match rate 50 %), 0 by the best guess" in column_verdict(scored)


def test_a_row_has_no_similarity_of_pictures_and_the_middle_of_its_units_as_best_guess():
    model = torch.nn.Linear(7, 2)
    view, truth = from_batch(model, ROW, torch.tensor([1]), input_range=(-4, 4), categories=[(2, 5), (5, 7)])
    (row,) = score(Reconstruction(truth.inputs, truth.labels), truth, task=view.task)
    assert row["row_accuracy"] == 1
    assert row["psnr"] == 100
    assert row["ssim"] is None
    assert row["missing"]["ssim"] == "of pictures alone, and these inputs are none"
    assert row["floor_mean_row_accuracy"] < 1
    assert row["floor_mean_psnr"] < 20
