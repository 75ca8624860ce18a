"""`hyperleak.flower` holds all that an app needs, and says what is missing where Flower is."""

import importlib
import sys
from importlib.util import find_spec

import pytest


@pytest.mark.skipif(find_spec("flwr") is None, reason="Flower is not here")
def test_all_names_are_there():
    module = importlib.import_module("hyperleak.flower")
    assert all(getattr(module, name) is not None for name in module.__all__)


def test_without_flower_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr", None)
    monkeypatch.delitem(sys.modules, "hyperleak.flower", raising=False)
    with pytest.raises(ImportError, match=r"pip install '\.\[flower\]' in the folder of hyperleak"):
        importlib.import_module("hyperleak.flower")
