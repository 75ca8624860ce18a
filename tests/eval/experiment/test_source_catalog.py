"""What the source says of registered names is what the registries say."""

import re
import subprocess
import sys

import pytest

from eval.commands import show
from eval.commands.list_ import registries
from eval.experiment import config_catalog, source_catalog, yaml_config
from eval.experiment.docstrings import citations, plain_words, summarize
from eval.experiment.serialization import SECTIONS
from eval.io import yaml12
from fl.defense import Defense
from fl.registry import UnknownNameError
from fl.settings import SettingError


def registered(kind):
    """Names that come with this package; tests register some of their own."""
    registry = registries()[kind]
    return {
        name: entry
        for name in registry.names()
        if (entry := registry.get(name)).__module__.partition(".")[0] in source_catalog.OURS
    }


@pytest.mark.parametrize("kind", source_catalog.KINDS)
def test_names_are_those_of_the_registry(kind):
    assert source_catalog.names(kind) == sorted(registered(kind))


@pytest.mark.parametrize("kind", source_catalog.KINDS)
def test_everything_that_is_shown_is_as_in_the_registry(kind):
    for name, entry in registered(kind).items():
        outline = source_catalog.entry(kind, name)
        assert summarize(outline) == summarize(entry), name
        assert citations(outline) == citations(entry), name
        assert show._describe_entry(kind, outline) == show._describe_entry(kind, entry), name


def test_sections_are_those_of_a_config():
    assert source_catalog.sections() == list(SECTIONS)
    for name, section in SECTIONS.items():
        assert show._describe_entry("section", source_catalog.section(name), name) == show._describe_entry(
            "section", section, name
        )


def test_what_the_source_leaves_leftis_not_made_up(tmp_path, monkeypatch):
    (tmp_path / "fl").mkdir()
    (tmp_path / "fl" / "odd.py").write_text(
        "from dataclasses import dataclass, field\n\n\n"
        '@dataclass(frozen=True)\nclass Computed:\n    """Computed."""\n\n    lr: float = float("0.1")\n'
    )
    monkeypatch.setattr(source_catalog, "ROOT", tmp_path)
    module = source_catalog._Module.read("fl.odd")
    with pytest.raises(source_catalog.UnclearSourceError, match="float"):
        source_catalog._outlined(*module.find("Computed"))


def test_registries_are_asked_once_they_are_imported(monkeypatch):
    assert not source_catalog.certain()
    monkeypatch.delitem(sys.modules, "eval.experiment.plugins", raising=False)
    assert not source_catalog.certain()  # whoever imports a registry alone may have entered something there


@pytest.mark.parametrize(
    ("kind", "spec"),
    [("methods", "fedavgg"), ("attacks", "peel+igg"), ("attacks", {"name": "igg"}), ("defenses", "prun")],
)
def test_a_misspelled_name_is_refused_as_its_registry_refuses_it(kind, spec):
    with pytest.raises(UnknownNameError) as early:
        source_catalog.check_names(kind, spec)
    with pytest.raises(UnknownNameError) as late:
        registries()[kind].build(spec)
    known = re.compile(r"(?<=shows all )\d+")  # tests register some of their own
    assert known.sub("", str(early.value)) == known.sub("", str(late.value))


@pytest.mark.parametrize(
    ("kind", "left", "wrong"),
    [
        ("models", "mine:build", "mine"),
        ("methods", {"lr": 1}, {"lr": 1, "name": "mine"}),
        ("attacks", None, "None"),
        ("attacks", "peel+ig", "peel+mine"),
    ],
)
def test_names_that_may_be_known_are_left_to_who_reads_them(kind, left, wrong):
    source_catalog.check_names(kind, left)
    with pytest.raises(UnknownNameError):
        source_catalog.check_names(kind, wrong)


QUICK = {  # commands, and the codes they leave with
    "list": 0,
    "list attacks --json": 0,
    "list configs": 0,
    "show hyperfl": 0,
    "show peel+ig --json": 0,
    "show task": 0,
    "show nosuch": 2,
    "audit method nosuch --dataset faces": 2,
    "audit --method fedavg --dataset faces --attack igg": 2,
    "audit method fedavg --dataset facess": 2,
    "audit method fedavg --dataset faces --model hyperfl-gray --defense [noise,prune]": 2,
    "audit model mine:build --attack igg": 2,
    "show tabel1": 2,
    "run nosuch": 2,
    "run quickstart --set method=fedagv": 2,
    "run quickstart --set attack=peel+igg": 2,
    "run quickstart --set task.dataset=cifar": 2,
}


@pytest.mark.parametrize("name", config_catalog.list_config_names())
def test_every_name_in_shipped_configs_is_known_from_the_source(name):
    config = yaml12.parse(yaml12.read(config_catalog.find_config(name)))
    source_catalog.check_config_names(config)
    with pytest.raises(SettingError, match=r"^method: unknown method 'mine'"):
        source_catalog.check_config_names({**config, "method": "mine"})


@pytest.mark.parametrize("config", [None, [], "text", {"method": 3}, {"task": "faces"}])
def test_what_is_no_config_is_left_to_who_reads_it(config):
    source_catalog.check_config_names(config)
    with pytest.raises((ValueError, TypeError)):
        yaml_config.read(config)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"method": ["fedavg", {"name": "fedagv"}]}, "^method: unknown method 'fedagv'; did you mean 'fedavg'"),
        ({"federation": {"partition": {"name": "idd"}}}, "^federation.partition: unknown partition 'idd'"),
    ],
)
def test_a_misspelled_name_in_a_config_is_refused_from_the_source(config, said):
    with pytest.raises(SettingError, match=said):
        source_catalog.check_config_names(config)


def test_commands_that_compute_nothing_import_no_torch():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom eval.cli import app\n"
        f"for words, code in {QUICK!r}.items():\n"
        "    result = CliRunner().invoke(app, words.split())\n"
        "    assert result.exit_code == code, (words, result.output)\n"
        "    imported = sorted({'torch', 'numpy'} & set(sys.modules))\n"
        "    assert not imported, (words, imported)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_plain_words_of_a_base_are_not_those_of_a_class_without_its_own():
    class TopK(Defense):
        """Sends the largest entries alone.

        More follows.
        """

    assert plain_words(TopK) == ""
    assert summarize(TopK) == "Sends the largest entries alone"


@pytest.mark.parametrize("kind", ["methods", "attacks", "defenses"])
def test_every_class_that_comes_with_this_package_has_plain_words_of_its_own(kind):
    assert {name for name, entry in registered(kind).items() if not plain_words(entry)} <= {"chain"}
