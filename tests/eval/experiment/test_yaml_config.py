from pathlib import Path

import pytest

from attacks.base import Chain
from eval.experiment import yaml_config
from eval.io import yaml12
from fl.registry import UnknownNameError

TEXT = """
title: two methods
task: {dataset: faces, model: hyperfl-grey}
federation: {partition: {name: iid, clients: 4}, rounds: 5}
method:
  - {name: fedavg, lr: 5e-2}
  - {name: hyperfl, as: scaled, parametrization: {name: hypernetwork, init: scaled}}
attack:
  - {name: ig, against: fedavg, tv_weight: 1e-6}
  - {name: peel+ig, iterations: 20}
threat: {knows_labels: true}
observe: {images: 8, batch_size: 2, method: {steps: 1, head_epochs: 0}}
"""


@pytest.fixture
def experiment():
    return yaml_config.read(yaml12.parse(TEXT))


def test_reads_numbers_names_and_single_values(experiment):
    fedavg, hyperfl = experiment.method
    assert (fedavg.label, fedavg.item.lr) == ("fedavg", 0.05)
    assert (hyperfl.label, hyperfl.item.parametrization.init) == ("scaled", "scaled")
    assert experiment.attack[0].against == ("fedavg",)
    assert experiment.attack[0].item.tv_weight == 1e-6
    assert isinstance(experiment.attack[1].item, Chain)
    assert experiment.attack[1].item.then.iterations == 20
    assert [entry.label for entry in experiment.defense] == ["none"]
    assert experiment.threat.knows_labels
    assert experiment.rounds == (5,)


def test_round_trip_and_canonical_dump(experiment):
    text = yaml_config.dump(experiment)
    again = yaml_config.read(yaml12.parse(text))
    assert again == experiment
    assert yaml_config.dump(again) == text
    assert "name: peel+ig" in text


def test_observed_methods_take_what_they_have(experiment):
    observed = experiment.observed_methods()
    assert (observed["fedavg"].steps, observed["fedavg"].epochs) == (1, None)
    assert (observed["scaled"].steps, observed["scaled"].head_epochs) == (1, 0)
    assert experiment.method[1].item.head_epochs == 1


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("attack.iterations=7", lambda x: [x.attack[0].item.iterations, x.attack[1].item.then.iterations] == [7, 7]),
        ("attack.peel+ig.iterations=7", lambda x: x.attack[0].item.iterations != 7 == x.attack[1].item.then.iterations),
        ("method.head_lr=1e-3", lambda x: x.method[1].item.head_lr == 0.001),
        ("method.lr=0.5", lambda x: all(entry.item.lr == 0.5 for entry in x.method)),
        ("method.scaled.lr=0.5", lambda x: x.method[0].item.lr == 0.05),
        ("method.parametrization.init=published", lambda x: x.method[1].item.parametrization.init == "published"),
        ("observe.method.epochs=2", lambda x: x.observe.method["epochs"] == 2),
        ("federation.partition.clients=3", lambda x: x.federation.partition.clients == 3),
        ("seeds=[1, 2]", lambda x: x.seeds == (1, 2)),
        ("seeds=3", lambda x: x.seeds == (3,)),
        ("defense=none", lambda x: x.defense[0].label == "none"),
        ("observe.clients=2", lambda x: x.observe.clients == (2,)),
        ("method.max_norm=null", lambda x: all(entry.item.max_norm is None for entry in x.method)),
        ("score.lpips=off", lambda x: x.score.lpips == "off"),
    ],
)
def test_overrides_change_the_setting_they_name(experiment, override, read):
    if override == "observe.method.epochs=2":
        experiment = yaml_config.override(experiment, "observe.method={head_epochs: 0}")
    assert read(yaml_config.override(experiment, override))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("method.lrr=1", "did you mean 'method.lr'"),
        ("attack.ig.itterations=1", "did you mean 'attack.ig.iterations'"),
        ("fedration.rounds=1", "did you mean 'federation"),
        ("federation.rounds=many", "^federation.rounds=many: expected a whole number.*'many'"),
        ("attack.iterations=0", "attack.ig.iterations: expected a whole number >= 1, got 0"),
        ("observe.method.stepz=1", "did you mean 'steps'"),
        ("attack.iterations", "expected key=value"),
        ("=3", "expected key=value"),
        ("seeds=[1", "line"),
        ("observe.method.epochs=2", "no effect"),
        ("title.x=1", "title is '[^']*', with no 'x' in it; set title as a whole"),
        ("attack.ig.private_lr.head=0.1", "attack.ig.private_lr is 0.01, with no 'head' in it"),
    ],
)
def test_bad_overrides_say_what_is_wrong(experiment, override, said):
    with pytest.raises(ValueError, match=said):
        yaml_config.override(experiment, override)


def test_an_overruled_number_is_refused(experiment):
    stepped = yaml_config.override(experiment, "method.fedavg.steps=3")
    with pytest.raises(ValueError, match="no effect"):
        yaml_config.override(stepped, "method.fedavg.epochs=2")


@pytest.mark.parametrize(
    ("line", "replacement", "said"),
    [
        ("title: two methods", "titel: x", "did you mean 'title'"),
        ("dataset: faces", "dataset: face", "task.dataset: unknown dataset 'face'; did you mean 'faces'"),
        ("dataset: faces", "datset: faces", "did you mean 'dataset'"),
        ("model: hyperfl-grey", "model: {name: hyperfl-gray}", "did you mean 'hyperfl-grey'"),
        ("{dataset: faces, model: hyperfl-grey}", "{dataset: faces}", "task: expected a value for model"),
        ("{dataset: faces, model: hyperfl-grey}", "faces", "task: expected settings"),
        ("rounds: 5", "rounds: -1", "federation.rounds: expected a whole number >= 0, got -1"),
        ("rounds: 5", "rounds: 5, client_fraction: 0", "federation.client_fraction"),
        ("lr: 5e-2", "lr: fast", "method.fedavg.lr: .*'fast'"),
        ("lr: 5e-2", "learning: 1", "unknown setting of method 'fedavg' 'learning'"),
        ("against: fedavg", "against: fedagv", "did you mean 'fedavg'"),
        ("name: ig", "name: igg", "did you mean 'ig'"),
        ("as: scaled", "as: fedavg", "fedavg is there twice"),
        ("as: scaled", "as: a/b", "expected `as`"),
        ("knows_labels: true", "knows_label: true", "did you mean 'knows_labels'"),
        ("knows_labels: true", "knows_labels: maybe", "threat.knows_labels: .*'maybe'"),
        ("knows_labels: true", "history_rounds: -2", "threat.history_rounds: expected a whole number >= 0, got -2"),
        ("images: 8", "images: 7", "observe.images: expected a multiple of batch_size 2, got 7"),
        ("images: 8", "images: 0, rounds: 9", "observe.images"),
        ("images: 8", "rounds: 9", "observe.rounds: expected at most 5"),
        ("steps: 1", "setps: 1", "did you mean 'steps'"),
        ("batch_size: 2", "batch_size: 2, batch_size: 4", "line 12: 'batch_size' is given twice"),
        ("as: scaled", "as: scaled, steps: 3, epochs: 2", "hyperfl.epochs: no effect, as another setting overrules it"),
        ("title: two methods", "seeds: []", "seeds: expected one or more"),
        ("attack:", "attack: []\nthreta:", "did you mean 'threat'"),
    ],
)
def test_bad_configs_say_what_is_wrong(line, replacement, said):
    assert line in TEXT
    with pytest.raises(ValueError, match=said):
        yaml_config.read(yaml12.parse(TEXT.replace(line, replacement)))


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match="expected a value for task, method, got none"):
        yaml_config.read({})
    with pytest.raises(ValueError, match="expected settings"):
        yaml_config.read([1])


def test_overrides_are_applied_in_an_order_in_which_they_fit(tmp_path):
    path = tmp_path / "trained.yaml"
    path.write_text(TEXT)
    given = ["federation.rounds=1", "observe.rounds=[0, 1]", "observe.rounds=[1]"]
    longer = yaml_config.load(path, ["federation.rounds=9", "observe.rounds=[9]"])
    path.write_text(yaml_config.dump(longer))
    with pytest.raises(ValueError, match=r"observe.rounds: expected at most 1"):
        yaml_config.load(path, given[:1])
    found = yaml_config.load(path, given)
    assert (found.federation.rounds, found.observe.rounds) == (1, (1,))
    with pytest.raises(ValueError, match="rouds"):
        yaml_config.load(path, ["federation.rouds=1", *given])


@pytest.mark.parametrize(
    ("given", "tv"),
    [
        (["attack.tv_weight=1", "attack.ig.tv_weight=2", "attack.tv_weight=3"], [3.0]),
        (["attack.ig.tv_weight=[1, 2]", "attack.ig.tv_weight=3"], [3.0]),
        (["attack.ig.tv_weight=3", "attack.ig.tv_weight=[1, 2]"], [1.0, 2.0]),
        (["attack.ig.tv_weight=3", "attack=[{name: ig, tv_weight: 4}]"], [4.0]),
    ],
)
def test_of_overrides_of_one_setting_the_last_holds(tmp_path, given, tv):
    (tmp_path / "two.yaml").write_text(TEXT)
    found = yaml_config.load(tmp_path / "two.yaml", given)
    assert [entry.item.tv_weight for entry in found.attack if entry.label.startswith("ig")] == tv


def test_an_override_that_waited_does_not_overtake_later_ones(tmp_path):
    (tmp_path / "two.yaml").write_text(TEXT)
    waits = ["observe.rounds=[7]", "observe.rounds=[2]", "federation.rounds=7"]
    assert yaml_config.load(tmp_path / "two.yaml", waits).observe.rounds == (2,)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (["defense=noise", "defense.std=0.1"], lambda x: x.defense[0].item.std == 0.1),
        (["defense=[none, noise]", "defense.noise.std=[0.1, 0.5]"], lambda x: len(x.defense) == 3),
        (["task.dataset=photos", "task.dataset.size=16"], lambda x: x.task.dataset.size == 16),
        (
            ["federation.partition=dirichlet", "federation.partition.alpha=2"],
            lambda x: x.federation.partition.alpha == 2,
        ),
        (["method=hyperfl", "method.parametrization.hidden=6", "attack=peel+ig"], lambda x: x.rounds == (5,)),
    ],
)
def test_what_an_override_names_has_settings_that_later_ones_change(tmp_path, given, read):
    (tmp_path / "two.yaml").write_text(TEXT)
    assert read(yaml_config.load(tmp_path / "two.yaml", given))


@pytest.mark.parametrize("bad", ["attack.ig.tv_weight", "attack.ig.tv_weight=bad"])
def test_a_wrong_override_is_said_even_if_a_later_one_is_right(tmp_path, bad):
    (tmp_path / "two.yaml").write_text(TEXT)
    with pytest.raises(ValueError, match=r"attack\.ig\.tv_weight"):
        yaml_config.load(tmp_path / "two.yaml", [bad, "attack.ig.tv_weight=4"])


def test_load_names_the_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="no config file"):
        yaml_config.load(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("task: [")
    with pytest.raises(ValueError, match=r"bad\.yaml: line 1"):
        yaml_config.load(tmp_path / "bad.yaml")
    (tmp_path / "good.yaml").write_text(TEXT)
    assert yaml_config.load(tmp_path / "good.yaml", ["seeds=7"]).seeds == (7,)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1.e+3", 1000.0),
        ("-.5", -0.5),
        ("7", 7),
        ("010", "010"),
        ("1:30", "1:30"),
        ("no", "no"),
        ("off", "off"),
        ("true", True),
        ("null", None),
        ("none", "none"),
        (".inf", float("inf")),
    ],
)
def test_scalars_mean_what_they_look_like(text, value):
    parsed = yaml12.parse(text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    "value", ["1e-4", "no", "true", "7", "null", 1e-4, 5e-324, 1e22, True, None, [1, {"a": "x: y"}]]
)
def test_yaml_round_trip(value):
    assert yaml12.parse(yaml12.dump({"key": value})) == {"key": value}


def test_yaml_runs_nothing():
    with pytest.raises(ValueError, match="could not determine a constructor"):
        yaml12.parse("!!python/object/apply:os.getcwd []")


def test_unknown_names_have_their_own_error(experiment):
    with pytest.raises(ValueError, match="foo"):
        yaml_config.override(experiment, "foo=1")
    with pytest.raises(UnknownNameError):
        yaml_config.read({"foo": 1})


def test_committed_configs_are_read_as_they_are_written_out():
    paths = sorted((Path(__file__).parents[3] / "configs").rglob("*.yaml"))  # all are read in a test of their own
    for path in {path.parent: path for path in paths}.values():
        found = yaml_config.load(path)
        assert yaml_config.read(yaml12.parse(yaml_config.dump(found))) == found
