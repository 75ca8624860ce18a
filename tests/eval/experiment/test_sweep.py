"""Lists for settings that take one value: a grid of labeled entries."""

import re
from dataclasses import replace

import numpy
import pytest

from eval.experiment import sweep as grid
from eval.experiment import yaml_config
from eval.experiment.serialization import with_changes
from eval.io import yaml12

TEXT = """
task: {dataset: faces, model: hyperfl-grey}
federation: {partition: {name: iid, clients: 4}, rounds: 5}
method:
  - {name: fedavg, lr: 5e-2}
  - {name: hyperfl, parametrization: {name: hypernetwork, init: scaled}}
defense: [none, noise]
attack:
  - {name: ig, against: fedavg, tv_weight: 1e-6}
  - {name: peel+ig, iterations: 20}
observe: {images: 8, batch_size: 2}
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(TEXT)
    return file


def labels(experiment, kind: str) -> list[str]:
    return [entry.label for entry in getattr(experiment, kind)]


def test_a_list_of_values_sweeps_an_attack_setting(path):
    found = yaml_config.load(path, ["attack.ig.tv_weight=[1e-4, 1e-2]"])
    assert labels(found, "attack") == ["ig@tv_weight=0.0001", "ig@tv_weight=0.01", "peel+ig"]
    assert [entry.item.tv_weight for entry in found.attack[:2]] == [1e-4, 1e-2]
    assert all(entry.against == ("fedavg",) for entry in found.attack[:2])
    every = yaml_config.load(path, ["attack.tv_weight=[1e-4, 1e-2]"])
    assert labels(every, "attack") == [
        "ig@tv_weight=0.0001",
        "ig@tv_weight=0.01",
        "peel+ig@tv_weight=0.0001",
        "peel+ig@tv_weight=0.01",
    ]


def test_method_settings_take_their_attacks_along(path):
    found = yaml_config.load(path, ["method.fedavg.lr=[0.1, 1]"])
    assert labels(found, "method") == ["fedavg@lr=0.1", "fedavg@lr=1", "hyperfl"]
    assert found.attack[0].against == ("fedavg@lr=0.1", "fedavg@lr=1")


def test_nested_settings_go_where_they_are(path):
    found = yaml_config.load(path, ["method.parametrization.init=[published, scaled]"])
    assert labels(found, "method") == ["fedavg", "hyperfl@init=published", "hyperfl@init=scaled"]


def test_settings_that_fit_only_together_are_changed_together(path):
    found = yaml_config.load(path, ["observe.rounds=[5]"])
    less = with_changes(found, {"federation.rounds": 2, "observe.rounds": [1, 2]}, "shorter")
    assert (less.federation.rounds, less.rounds) == (2, (1, 2))
    with pytest.raises(ValueError, match=r"shorter: .*expected at most 2"):
        with_changes(found, {"federation.rounds": 2}, "shorter")


@pytest.mark.parametrize("value", [0.25, numpy.float64(0.25)])
def test_settings_of_the_observed_round_may_be_numbers_of_numpy(path, value):
    found = yaml_config.load(path)
    watched = replace(found, observe=replace(found.observe, method={"lr": value})).observed_methods()
    assert {method.lr for method in watched.values()} == {0.25}


def test_a_list_of_values_sweeps_a_defense_setting(path):
    found = yaml_config.load(path, ["defense.noise.std=[0.1, 0.5]"])
    assert labels(found, "defense") == ["none", "noise@std=0.1", "noise@std=0.5"]


def test_products_in_the_order_of_the_keys(path):
    found = yaml_config.load(
        path, ["attack.ig.tv_weight=[0, 1]", "attack.ig.restarts=[1, 2]", "attack.ig.iterations=7"]
    )
    assert labels(found, "attack")[:4] == [f"ig@tv_weight={tv}@restarts={n}" for tv in (0, 1) for n in (1, 2)]
    assert all(entry.item.iterations == 7 for entry in found.attack[:4])


def test_sections_become_settings_of_entries(path):
    found = yaml_config.load(path, ["federation.rounds=[1, 5]", "observe.batch_size=[1, 8]"])
    assert labels(found, "method")[:2] == ["fedavg@rounds=1", "fedavg@rounds=5"]
    assert found.method[0].changes == {"federation.rounds": 1}
    assert labels(found, "attack")[:2] == ["ig@batch_size=1", "ig@batch_size=8"]
    part = grid.experiment_of(found, found.method[0], found.attack[1])
    assert (part.federation.rounds, part.observe.batch_size) == (1, 8)
    assert part.rounds == (1,)
    task = yaml_config.load(path, ["task.dataset.test_share=[0.2, 0.4]", "federation.partition.clients=[2, 4]"])
    assert len(task.method) == 8


def test_the_resolved_config_shows_it_and_is_read_back(path, tmp_path):
    words = ["attack.ig.tv_weight=[1e-4, 1e-2]", "federation.rounds=[1, 5]", "observe.method.steps=[1, 2]"]
    found = yaml_config.load(path, words)
    text = yaml_config.dump(found)
    assert "as: ig@tv_weight=0.0001@steps=1" in text
    assert "federation.rounds: 5" in text
    assert "sweep" not in text
    (tmp_path / "again.yaml").write_text(text)
    assert yaml_config.load(tmp_path / "again.yaml") == found


def test_the_section_of_a_file_says_the_same(path, tmp_path):
    (tmp_path / "b.yaml").write_text(TEXT + "sweep: {attack.ig.tv_weight: [1e-4, 1e-2], federation.rounds: [1, 5]}\n")
    assert yaml_config.load(tmp_path / "b.yaml") == yaml_config.load(
        path, ["attack.ig.tv_weight=[1e-4, 1e-2]", "federation.rounds=[1, 5]"]
    )


def test_a_list_where_a_list_belongs_is_no_grid(path):
    found = yaml_config.load(path, ["observe.clients=[0, 1]", "observe.rounds=[1, 2]", "seeds=[0, 1]"])
    assert found.observe.clients == (0, 1)
    assert found.seeds == (0, 1)
    assert len(found.method) == 2
    assert yaml_config.load(path, ["method.fedavg.lr=[0.05]"]).method[0].label == "fedavg"  # one value, the same


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("attack.ig.tv_weigth=[1, 2]", "did you mean 'attack.ig.tv_weight'"),
        ("attack.ig.tv_weight=[1e-4, fast]", "^sweep, attack.ig.tv_weight: expected a number.*'fast'"),
        ("attack.ig.tv_weight=[1, 1]", "expected different values"),
        ("attack.ig.tv_weight=[[1], [2]]", "expected a list of single values"),
        ("threat.knows_labels=[true, false]", "hyperleak compare"),
        ("score.lpips=[off, alex]", "hyperleak compare"),
        ("federation.rounds=[1, -5]", "federation.rounds: expected a whole number >= 0, got -5"),
        ("method.lr=[]", "lr"),
        ("task.dataset.name=[faces, phtos]", "did you mean 'photos'"),
    ],
)
def test_what_makes_no_grid_is_refused(path, text, said):
    with pytest.raises(ValueError, match=said):
        yaml_config.load(path, [text])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("sweep: {atack.ig.tv_weight: [1, 2]}", "did you mean 'attack'"),
        ("sweep: {attack.ig.tv_weight: 1}", "expected a list of single values"),
        ("sweep: {seeds: [0, 1]}", "expected a single setting"),
        ("sweep: [1]", "sweep: expected settings"),
        ("swep: {attack.ig.tv_weight: [1, 2]}", "did you mean 'sweep'"),
    ],
)
def test_bad_sections_say_what_is_wrong(line, said):
    with pytest.raises(ValueError, match=said):
        yaml_config.read(yaml12.parse(f"{TEXT}{line}\n"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ("{federation.roundz: 1}", "did you mean 'federation.rounds'"),
        ("{observe.images: 1}", "unknown section in method.with 'observe'"),
        ("{federation: 1}", "expected keys such as federation.rounds"),
        ("{federation.rounds: -1}", "federation.rounds: expected a whole number >= 0, got -1"),
        ("1", "expected settings"),
    ],
)
def test_settings_of_single_entries_are_checked(changes, said):
    with pytest.raises(ValueError, match=said):
        yaml_config.read(yaml12.parse(TEXT.replace("lr: 5e-2}", f"lr: 5e-2, with: {changes}}}")))


@pytest.mark.parametrize(
    ("line", "replacement", "key"),
    [
        ("tv_weight: 1e-6", "tv_weight: [1e-4, 1e-2]", "attack.ig.tv_weight"),
        ("iterations: 20", "as: peeled, objective: [cosine, l2]", "attack.peeled.objective"),
        ("lr: 5e-2", "lr: [0.1, 1]", "method.fedavg.lr"),
        ("init: scaled", "hidden: [6, 12]", "method.hyperfl.parametrization.hidden"),
        ("clients: 4", "clients: [2, 4]", "federation.partition.clients"),
        ("batch_size: 2", "batch_size: [2, 4]", "observe.batch_size"),
    ],
)
def test_a_list_in_a_file_says_how_to_make_a_grid(path, line, replacement, key):
    path.write_text(TEXT.replace(line, replacement))
    with pytest.raises(ValueError, match=r"expected .*, got \[") as error:
        yaml_config.load(path)
    sweep, override = re.search(r"; for a grid write `(.*)` in the file, or `--set (.*)`$", str(error.value)).groups()
    assert override.partition("=")[0] == key
    path.write_text(TEXT.replace("iterations: 20", "as: peeled, iterations: 20") if "peeled" in key else TEXT)
    found = yaml_config.load(path, [override])
    path.write_text(f"{path.read_text()}{sweep}\n")
    assert yaml_config.load(path) == found
    assert sum("@" in label for kind in ("method", "attack") for label in labels(found, kind)) in {2, 4}


@pytest.mark.parametrize(
    ("line", "replacement"),
    [
        ("tv_weight: 1e-6", "tv_weight: [1e-4, much]"),
        ("tv_weight: 1e-6", "tv_weight: much"),
        ("tv_weight: 1e-6", "as: ig-0.1, tv_weight: [1e-4, 1e-2]"),  # `attack.ig-0.1.tv` is no key
        ("lr: 5e-2", "with: {federation.rounds: [1, 2]}"),
        ("images: 8", "clients: [one, two]"),
        ("defense:", "threat: {knows_labels: [true, false]}\ndefense:"),
    ],
)
def test_where_no_grid_would_do_none_is_offered(path, line, replacement):
    path.write_text(TEXT.replace(line, replacement))
    with pytest.raises(ValueError, match="expected ") as error:
        yaml_config.load(path)
    assert "for a grid" not in str(error.value)


SWEPT = """
sweep: {federation.rounds: [1, 5], attack.ig.tv_weight: [1e-4, 1e-2]}
published:
  - {method: fedavg, accuracy: 0.5, source: A paper}
  - {method: fedavg@rounds=1, accuracy: 0.6, source: A paper}
  - {method: fedavg@rounds=5, attack: ig@tv_weight=0.01, psnr: 16.0, source: A paper}
"""


@pytest.fixture
def swept(path):
    """Labels of methods and attacks, what published figures are of, and what is noted, after overrides."""
    path.write_text(TEXT + SWEPT)

    def found(*overrides):
        notes = []
        experiment = yaml_config.load(path, overrides, note=notes.append)
        assert "sweep" not in yaml_config.to_plain(experiment)
        return (
            [label.removeprefix("fedavg") for label in labels(experiment, "method") if label.startswith("fedavg")],
            [label.removeprefix("ig") for label in labels(experiment, "attack") if label.startswith("ig")],
            [figures.method.removeprefix("fedavg") for figures in experiment.published],
            [note.partition(": ")[2] for note in notes],
        )

    return found


ROUNDS, TVS = ["@rounds=1", "@rounds=5"], ["@tv_weight=0.0001", "@tv_weight=0.01"]


@pytest.mark.parametrize(
    ("overrides", "left"),
    [
        ([], (ROUNDS, TVS, ["", *ROUNDS], [])),
        (["federation.rounds=1"], (ROUNDS[:1], TVS, ["", ROUNDS[0]], ["fedavg@rounds=5"])),
        (["federation.rounds=2"], (["@rounds=2"], TVS, [""], ["fedavg@rounds=1, fedavg@rounds=5"])),
        (["attack.ig.tv_weight=1e-4"], (ROUNDS, TVS[:1], ["", ROUNDS[0]], ["ig@tv_weight=0.01"])),
        (["sweep={}"], ([""], [""], [""], ["fedavg@rounds=1, fedavg@rounds=5"])),
        (["sweep={attack.ig.tv_weight: [1e-2]}"], ([""], TVS[1:], [""], ["fedavg@rounds=1, fedavg@rounds=5"])),
        (["sweep.federation.rounds=[5]"], (ROUNDS[1:], TVS, ["", ROUNDS[1]], ["fedavg@rounds=1"])),
        (["sweep.attack.ig.tv_weight=[]"], (ROUNDS, [""], ["", ROUNDS[0]], ["ig@tv_weight=0.01"])),
        (["sweep.attack.ig.tv_weight=null"], (ROUNDS, [""], ["", ROUNDS[0]], ["ig@tv_weight=0.01"])),
        (
            ["attack.tv_weight=1e-4"],
            (ROUNDS, [""], ["", ROUNDS[0]], ["ig@tv_weight=0.01"]),
        ),  # of all attacks, this one too
        (
            ["attack.tv_weight=[1e-4, 1e-3]"],
            (ROUNDS, [TVS[0], "@tv_weight=0.001"], ["", ROUNDS[0]], [f"ig{TVS[1]}"]),
        ),
        (["published=[]"], (ROUNDS, TVS, [], [])),
        (["observe.batch_size=16", "published=[]", "observe.images=16"], (ROUNDS, TVS, [], [])),  # the first waits
        (["published=[{method: fedavg, seconds: 1, source: Ours}]"], (ROUNDS, TVS, [""], [])),
        (["method=fedavg", "attack=ig"], (ROUNDS, TVS, ["", *ROUNDS], [])),
    ],
)
def test_a_sweep_of_a_file_can_be_cut_down(swept, overrides, left):
    assert swept(*overrides) == left


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sweep=3", "sweep=3: expected settings"),
        ("sweep.atack.ig.tv_weight=[1, 2]", "did you mean 'attack'"),
        ("sweep.attack.ig.tv_weigth=null", "unknown sweep 'attack.ig.tv_weigth'; did you mean 'attack.ig.tv_weight'"),
        ("sweep.attack.ig.restarts=[]", "unknown sweep"),
        ("sweep.attack.ig.tv_weight=3", "expected a list of single values, got 3"),
        ("attack.ig.tv_weight=fast", "tv_weight=fast: expected a number.*'fast'"),
        ("federation.rounds=-1", "^federation.rounds=-1: expected a whole number >= 0, got -1"),
        ("published=[{method: fedagv, source: Ours}]", "did you mean 'fedavg'"),
    ],
)
def test_what_makes_no_sweep_is_still_refused(swept, text, said):
    with pytest.raises(ValueError, match=said):
        swept(text)


def test_a_slip_in_a_file_is_no_entry_left_out(path):
    path.write_text(TEXT + SWEPT.replace("fedavg@rounds=5", "fedavg@rounds=6"))
    with pytest.raises(ValueError, match="did you mean 'fedavg@rounds=1'"):
        yaml_config.load(path)


def test_some_of_what_a_sweep_sets_can_not_be_set_apart(path):
    path.write_text(TEXT + "sweep: {method.lr: [0.1, 0.2]}\n")
    for value in ("0.7", "[0.7, 0.8]"):
        with pytest.raises(
            ValueError, match=r"method.fedavg.lr: the sweep 'method.lr' has values for this and for more"
        ):
            yaml_config.load(path, [f"method.fedavg.lr={value}"])


@pytest.mark.filterwarnings("ignore::fl.settings.FormerNameWarning")
@pytest.mark.parametrize(
    ("former", "today", "label"),
    [
        ("attack.tv=[1e-4, 1e-2]", "attack.tv_weight=[1e-4, 1e-2]", "ig@tv_weight=0.0001"),
        ("federation.rate=[0.5, 1.0]", "federation.client_fraction=[0.5, 1.0]", "fedavg@client_fraction=0.5"),
    ],
)
def test_labels_have_todays_name_of_a_setting(path, former, today, label):
    by_former, by_today = (yaml_config.load(path, [text]) for text in (former, today))
    assert by_former == by_today
    assert label in labels(by_former, "attack") + labels(by_former, "method")


@pytest.mark.filterwarnings("ignore::fl.settings.FormerNameWarning")
@pytest.mark.parametrize("overrides", [[], ["seeds=[0]"]])
def test_published_figures_of_a_sweep_by_a_former_name(path, overrides):
    path.write_text(
        f"{TEXT}sweep: {{attack.tv: [1e-4, 1e-2]}}\n"
        "published:\n  - {method: fedavg, attack: ig@tv=0.01, psnr: 16, source: a paper}\n"
    )
    assert yaml_config.load(path, overrides).published[0].attack == "ig@tv_weight=0.01"


def test_labels_of_an_old_run_stay_in_its_own_config(path):
    path.write_text(TEXT.replace("attack:\n", "attack:\n  - {name: ig, as: ig@tv=0.01, tv_weight: 1e-2}\n"))
    assert labels(yaml_config.load(path), "attack")[0] == "ig@tv=0.01"
