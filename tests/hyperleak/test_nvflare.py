"""The public place of the filter for NVFlare, where NVFlare is not installed."""

import importlib
import sys

import pytest


def test_missing_nvflare_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("hyperleak.nvflare", "eval.federations.nvflare"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "nvflare", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"needs NVFlare: pip install '\.\[nvflare\]' in the folder of hyperleak"
    ):
        importlib.import_module("hyperleak.nvflare")
