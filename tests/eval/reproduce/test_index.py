"""The committed list of tables and figures is what configs and cells come to, and counts for nothing beside others."""

import json
import subprocess
import sys

import pytest

from eval.experiment import config_catalog
from eval.reproduce import index
from eval.reproduce.index import INDEX, list_indexed, read_index, to_entry, write_index
from eval.reproduce.items import find_item, list_items
from eval.reproduce.listing import list_status

AGAIN = "`python -m benchmarks.reproduce_list` writes the list anew"
ENTRIES = json.loads(INDEX.read_text())["items"]
DONE = [name for name, one in ENTRIES.items() if one["otherwise"] or any(s["measured"] for s in one["scales"].values())]
LIGHT = """
import sys
from eval.reproduce.index import list_indexed
from eval.reproduce.items import list_items
assert len(list_indexed(list_items())) > 100
assert not sys.modules.keys() & {"torch", "numpy"}
"""


def agrees(name: str) -> None:
    """Hold the entry of an item to what its config and the cells come to."""
    (found,) = list_status([find_item(name)])
    computed, entry = to_entry(found), ENTRIES[name]
    assert computed | {"scales": 0} == entry | {"scales": 0}, AGAIN
    assert computed["scales"].keys() == entry["scales"].keys(), AGAIN
    for scale, own in entry["scales"].items():
        here = computed["scales"][scale]
        if here["seconds"] is None:  # of a network whose weights are not at hand
            here["seconds"] = own["seconds"]
        assert here == pytest.approx(own, rel=0.01), f"{scale}: {AGAIN}"


def test_it_has_every_table_and_is_of_these_configs_and_cells():
    assert list(read_index(list_items())) == [item.name for item in list_items()], AGAIN


@pytest.mark.parametrize("name", [*DONE, "hfedf/figure5-pacs", "hyperfedzero/table1-mnist-lenet-s"])
def test_what_is_measured_is_what_cells_come_to(name):
    agrees(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENTRIES)
def test_all_of_it_is_what_configs_and_cells_come_to(name):
    agrees(name)


def test_some_rows_are_measured_at_the_size_of_the_paper_or_otherwise():
    whole, other = list_indexed([find_item("hyperfl/table3-pfedhn-cifar10"), find_item("hyperfl/table3-emnist")])
    assert whole.scales["paper"].measured == whole.rows == 2
    assert (other.scales["paper"].measured, other.otherwise) == (0, 2)  # on other handwriting
    assert "task.dataset=handwritten62" in other.changes


def test_a_changed_config_and_other_cells_are_noticed(tmp_path, monkeypatch):
    items = [find_item("hyperfl/table5-emnist"), find_item("hyperfl/table5-cifar10")]
    folder = tmp_path / "reproduce" / "hyperfl"
    folder.mkdir(parents=True)
    for item in items:
        (folder / item.path.name).write_bytes(item.path.read_bytes())
    with monkeypatch.context() as patch:
        patch.setattr(config_catalog, "CONFIGS", tmp_path)
        assert set(read_index(items)) == {item.name for item in items}
        (folder / "table5-emnist.yaml").write_text("title: another\n")
        assert set(read_index(items)) == {"hyperfl/table5-cifar10"}
    monkeypatch.setattr(index, "CELLS", tmp_path)
    assert read_index(items) == {}
    monkeypatch.setattr(index, "CELLS", tmp_path / "none")  # an installation
    assert len(read_index(items)) == 2


def test_nothing_is_taken_of_a_damaged_list(tmp_path):
    item = find_item("hyperfl/table5-emnist")
    path = tmp_path / "index.json"
    write_index(list_indexed([item]), path)
    assert read_index([item], path) == read_index([item])
    whole = json.loads(path.read_text())
    entry = whole["items"][item.name]
    for text in ("", "[]", json.dumps({**whole, "items": 3}), json.dumps({**whole, "items": {item.name: [1]}})):
        path.write_text(text)
        assert read_index([item], path) == {}, text
    for lost in ("config", "rows", "scales"):
        less = {key: value for key, value in entry.items() if key != lost}
        path.write_text(json.dumps({**whole, "items": {item.name: less}}))
        assert read_index([item], path) == {}, lost


def test_it_is_shown_without_what_takes_seconds_to_import():
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
