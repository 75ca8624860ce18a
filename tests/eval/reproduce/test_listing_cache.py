"""A list of items is kept for one state of code, configs and cells; nothing damaged or of another state is taken."""

import json

import pytest

from eval.experiment import config_catalog
from eval.reproduce import listing
from eval.reproduce.committed import Committed
from eval.reproduce.items import find_item
from eval.reproduce.listing_cache import NAME, ListingCache

ITEMS = ["hyperfednet/figure6", "hyperfednet/figure7"]


@pytest.fixture
def computed(monkeypatch):
    """Names of the items whose configs were read."""
    names, compute = [], listing._status_of

    def noted(item, committed):
        names.append(item.name)
        return compute(item, committed)

    monkeypatch.setattr(listing, "_status_of", noted)
    monkeypatch.setattr(listing, "read_committed", Committed)
    return names


def listed(kept):
    return listing.list_status([find_item(name) for name in ITEMS], kept=kept)


def test_what_is_kept_is_what_was_computed(tmp_path, computed):
    first = listed(ListingCache(tmp_path / "cache" / NAME))
    assert computed == ITEMS
    again = listed(ListingCache(tmp_path / "cache" / NAME))
    assert computed == ITEMS
    assert again == first


def test_nothing_is_taken_of_other_configs_or_a_damaged_file(tmp_path, computed, monkeypatch):
    file = tmp_path / NAME
    first = listed(ListingCache(file))
    whole = json.loads(file.read_text())
    damaged = ["", "[]", '{"items": 3}', json.dumps({**whole, "items": {name: {"rows": 1} for name in ITEMS}})]
    for text in damaged:
        computed.clear()
        file.write_text(text)
        assert listed(ListingCache(file)) == first
        assert computed == ITEMS, text
    monkeypatch.setattr(config_catalog, "CONFIGS", tmp_path)
    assert ListingCache(file).read() == {}


def test_it_is_in_the_users_cache_and_does_without(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ListingCache().path == tmp_path / "hyperleak" / NAME
    (tmp_path / "hyperleak").write_text("no folder")
    ListingCache().write({})
    assert ListingCache().read() == {}
