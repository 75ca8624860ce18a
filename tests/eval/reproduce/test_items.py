"""Tables and figures by name."""

import pytest
from support.runs import tiny
from support.tiny import Registered

from eval.experiment import config_catalog
from eval.reproduce.items import PaperRow, find_item, list_items, matching, rows_of


def test_every_table_and_figure_is_an_item_and_no_course_of_training_is():
    names = [item.name for item in list_items()]
    assert len(names) > 100
    assert {name.partition("/")[0] for name in names} == {
        "hfedf",
        "hyperfednet",
        "hyperfedzero",
        "hyperfl",
        "hypergenfl",
    }
    assert not any("curves" in name for name in names)
    assert {item.paper for item in list_items("hyperfl/table3")} == {"hyperfl"}


def test_a_name_may_leave_out_its_paper_and_its_ending():
    for name in ("hyperfl/table3-emnist", "reproduce/hyperfl/table3-emnist", "table3-emnist.yaml"):
        assert find_item(name).name == "hyperfl/table3-emnist"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("table9-cifra10", "did you mean hypergenfl/table9-cifar10 or "),
        ("hyperfl/curves-cifar10", "--list"),
        ("curves-cifar10", "--list"),
        (
            "hyperfl",
            r"'hyperfl' is a paper with \d\d tables and figures; `hyperleak reproduce --list hyperfl` shows them$",
        ),
        ("table1", "no table or figure is called 'table1'; did you mean [^ ]+/table1-[^ ]+ or "),
        ("table7-pacs-and-more-that-no-name-is-like", "is called '[^']+'; `hyperleak reproduce --list` shows all$"),
    ],
)
def test_unknown_names_get_close_ones_in_a_short_line(name, said):
    with pytest.raises(ValueError, match=said) as found:
        find_item(name)
    assert len(str(found.value)) < 250


def test_a_name_that_several_have_is_refused_with_some_of_them(monkeypatch):
    names = [f"reproduce/{paper}/table1" for paper in ("a", "b", "c", "d")]
    monkeypatch.setattr(config_catalog, "list_config_names", lambda: names)
    with pytest.raises(
        ValueError, match="4 tables and figures are called 'table1'; did you mean a/table1 or b/table1 or"
    ):
        find_item("table1")


def test_a_beginning_that_none_has_is_refused():
    with pytest.raises(ValueError, match="did you mean hyperfl or") as found:
        list_items("hyperlf")
    assert len(str(found.value)) < 250


def test_rows_are_those_printed_else_methods_and_attacks():
    with Registered():
        plain = tiny(
            "observe.method={steps: 1}",
            "method=[{name: fedavg, lr: 0.1}, {name: local, lr: 0.1}]",
            "attack=[{name: guess, against: fedavg}]",
        )
        assert rows_of(plain) == [PaperRow("fedavg", "guess"), PaperRow("local")]
        swept = tiny(
            "observe.method={steps: 1}",
            "method=[{name: fedavg, lr: 0.1}]",
            "attack=guess",
            'published=[{method: fedavg, attack: guess, psnr: 9, source: "Toy"}]',
            sweep={"attack.guess.spread": [0.1, 0.2]},
        )
    assert rows_of(swept) == [PaperRow("fedavg", "guess")]
    parts = [PaperRow("fedavg", f"guess@spread={value}") for value in (0.1, 0.2)]
    assert matching(swept, PaperRow("fedavg", "guess")) == parts
