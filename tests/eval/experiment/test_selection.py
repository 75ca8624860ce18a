"""Entries left out by their labels, with what is about nothing else."""

import pytest

from eval.experiment import yaml_config

TEXT = """
task: {dataset: faces, model: hyperfl-grey}
federation: {partition: {name: iid, clients: 4}, rounds: 5}
method:
  - {name: fedavg, lr: 5e-2}
  - {name: hyperfl, parametrization: {name: hypernetwork, init: scaled}}
defense: [none, noise]
attack:
  - {name: ig, against: fedavg}
  - {name: bilevel, against: hyperfl}
  - {name: dlg, against: [fedavg, hyperfl]}
  - idlg
observe: {images: 8, batch_size: 1, method: {steps: 1, head_epochs: 0}}
published:
  - {method: fedavg, attack: ig, psnr: 16.0, source: A paper}
  - {method: hyperfl, accuracy: 0.5, communication_share: 0.1, reference_method: fedavg, source: A paper}
sweep: {method.fedavg.lr: [0.1, 0.2]}
"""


@pytest.fixture
def load(tmp_path):
    (tmp_path / "a.yaml").write_text(TEXT)

    def loaded(**words):
        notes = []
        return yaml_config.load(tmp_path / "a.yaml", **words, note=notes.append), notes

    return loaded


def labels(experiment):
    return [[entry.label for entry in getattr(experiment, kind)] for kind in ("method", "defense", "attack")]


FEDAVG = ["fedavg@lr=0.1", "fedavg@lr=0.2"]
DEFENSES = ["none", "noise"]


@pytest.mark.parametrize(
    ("words", "left", "lost"),
    [
        ({"without": ["bilevel"]}, [[*FEDAVG, "hyperfl"], DEFENSES, ["ig", "dlg", "idlg"]], []),
        ({"without": ["ig"]}, [[*FEDAVG, "hyperfl"], DEFENSES, ["bilevel", "dlg", "idlg"]], ["ig"]),
        ({"without": ["fedavg", "noise"]}, [["hyperfl"], ["none"], ["bilevel", "dlg", "idlg"]], ["fedavg"]),
        ({"without": ["fedavg@lr=0.1"]}, [[FEDAVG[1], "hyperfl"], DEFENSES, ["ig", "bilevel", "dlg", "idlg"]], []),
        ({"without": ["hyperfl"]}, [FEDAVG, DEFENSES, ["ig", "dlg", "idlg"]], ["hyperfl"]),
        ({"only": ["hyperfl"]}, [["hyperfl"], DEFENSES, ["bilevel", "dlg", "idlg"]], ["fedavg"]),
        ({"only": ["ig", "none"]}, [[*FEDAVG, "hyperfl"], ["none"], ["ig"]], []),
        ({"only": ["fedavg"], "without": ["dlg"]}, [FEDAVG, DEFENSES, ["ig", "idlg"]], ["hyperfl"]),
    ],
)
def test_entries_are_left_out_with_what_is_of_them(load, words, left, lost):
    found, notes = load(**words)
    assert labels(found) == left
    assert notes == ([f"published figures of what is not run are left out: {', '.join(lost)}"] if lost else [])
    assert not any(
        figures.attack in lost or {figures.method, figures.reference_method} & set(lost) for figures in found.published
    )
    for attack in found.attack:
        assert set(attack.against) <= set(left[0])
    assert found.observe.method == {"steps": 1, **({"head_epochs": 0} if "hyperfl" in left[0] else {})}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"without": ["bilevl"]}, "unknown label 'bilevl'; did you mean 'bilevel'"),
        ({"only": ["hyprfl"]}, "unknown label 'hyprfl'; did you mean 'hyperfl'"),
        ({"without": ["fedavg", "hyperfl"]}, "at least one method to be left"),
        ({"without": ["none", "noise"]}, "at least one defense to be left"),
    ],
)
def test_what_leaves_nothing_or_is_unknown_is_refused(load, words, said):
    with pytest.raises(ValueError, match=said):
        load(**words)


@pytest.mark.parametrize("text", ["attack.bilevel=null", "attack.bilevel=[1, 2]", "method.hyperfl={lr: 1}"])
def test_an_entry_is_no_setting(load, text):
    label = text.split(".")[1].split("=")[0]
    with pytest.raises(ValueError, match="is an entry, not a setting") as error:
        load(overrides=[text])
    assert str(error.value).count(text) == 1
    assert f"--without {label} leaves it out" in str(error.value)


def test_an_overruled_setting_is_named_once(load):
    with pytest.raises(ValueError, match=r"^method\.fedavg\.epochs=2: epochs: no effect"):
        load(overrides=["method.fedavg.steps=3", "method.fedavg.epochs=2"])
