"""Modules of the user's own: found, imported once, kept in the run's config, and known to worker processes."""

import json
import os
import sys
import time

import pytest
import torch
from support.runs import tiny
from support.scripts import script
from support.tiny import CONFIG, Registered
from typer.testing import CliRunner

import attacks
from attacks import parallel
from eval import cli
from eval.commands import terminal
from eval.experiment import plugins, yaml_config
from eval.io import yaml12
from eval.run import cache_keys
from fl.capture import from_batch

ATTACK = '''
"""An attack that says in which process it ran."""
import os
from dataclasses import dataclass
import torch
from attacks.base import Attack, Reconstruction, attacks

@attacks.register("own-attack")
@dataclass(frozen=True, kw_only=True)
class Own(Attack):
    """Guesses gray (Nobody et al., 2020)."""
    gray: float = 0.5

    def attack_view(self, view, seed):
        inputs = torch.full((view.batch_size, *view.task.input_shape), self.gray)
        return Reconstruction(inputs, private={"process": torch.tensor(os.getpid())})
'''


@pytest.fixture(autouse=True)
def _as_before(monkeypatch, tmp_path):
    """Registries, modules and places as they were, whatever is imported; the current folder is a new one."""
    monkeypatch.setattr("eval.commands.system_errors.signal.signal", lambda *_: None)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])  # some command adds the current folder
    monkeypatch.setattr(plugins, "_sources", {})
    monkeypatch.chdir(tmp_path)
    before, modules = [set(registry.names()) for registry in plugins.REGISTRIES], set(sys.modules)
    with Registered():
        yield
    for registry, names in zip(plugins.REGISTRIES, before, strict=True):
        for name in set(registry.names()) - names:
            del registry._entries[name]
    for name in {"own_attack", "broken", "helped", "helper", "spy"} - modules:
        sys.modules.pop(name, None)


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own_attack.py").write_text(ATTACK)
    return tmp_path / "own_attack.py"


def call(*words):
    return CliRunner().invoke(cli.app, list(map(str, words)))


def settings(**changes):
    return {**yaml12.parse(CONFIG), "attack": "own-attack", **changes}


def test_a_config_says_what_it_imports(own):
    with pytest.raises(ValueError, match="unknown attack 'own-attack'"):
        yaml_config.read(settings())
    found = yaml_config.read(settings(imports="own_attack.py"))
    assert found.imports == ("own_attack.py",)
    assert found.attack[0].item.gray == 0.5
    assert yaml_config.read(yaml12.parse(yaml_config.dump(found))) == found
    assert "imports" not in yaml_config.dump(tiny())


def test_a_file_beside_the_config_comes_before_that_in_the_current_folder(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "own_attack.py").write_text(ATTACK)
    (tmp_path / "own_attack.py").write_text("raise ValueError('the wrong one')")
    (tmp_path / "below" / "tiny.yaml").write_text(yaml12.dump(settings(imports=["own_attack.py"])))
    assert yaml_config.load(tmp_path / "below" / "tiny.yaml").imports == ("below/own_attack.py",)


def test_a_module_goes_by_its_name_and_a_file_elsewhere_by_its_last_part(own, tmp_path_factory, monkeypatch):
    assert plugins.import_plugins(["own_attack"]) == ("own_attack",)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(elsewhere)
    assert plugins.import_plugins(["own_attack.py"], given=[str(own)]) == ("own_attack.py",)
    with pytest.raises(FileNotFoundError, match=r"no file own_attack\.py to import in .*; give it by --import"):
        plugins.import_plugins(["own_attack.py"])


@pytest.mark.parametrize(
    ("word", "text", "said"),
    [
        ("none.py", None, r"no file none\.py"),
        ("none_such", None, "no module 'none_such' in"),
        ("broken.py", "x = 1\ny = 1 / 0\n", r"broken\.py, line 2: ZeroDivisionError: division by zero"),
        ("broken.py", "x = 1\ny = = 2\n", r"broken\.py: SyntaxError: .*line 2"),
        ("broken.py", "\nimport not_there\n", r"broken\.py, line 2: ModuleNotFoundError: No module named 'not_there'"),
        (
            "broken.py",
            ATTACK.replace("own-attack", "ig"),
            r"broken\.py, line \d+: .*'ig' is taken by attacks\.gradient_matching\.ig\.",
        ),
        ("json.py", "x = 1\n", r"json\.py: there is another module 'json' \(.*\); rename the file"),
        ("bro.ken.py", "x = 1\n", "holds no dot"),
    ],
)
def test_what_can_not_be_imported_is_said_in_a_line(tmp_path, word, text, said):
    if text is not None:
        (tmp_path / word).write_text(text)
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        plugins.import_plugins([word])
    shown = call("show", "ig", "--import", word)
    assert shown.exit_code == terminal.USAGE
    assert shown.output.startswith("error: ")
    assert shown.output.count("\n") == 1


def test_a_name_of_ours_is_taken_in_a_fresh_process_too(tmp_path):
    (tmp_path / "broken.py").write_text(ATTACK.replace("own-attack", "ig"))  # imported before anything of ours is found
    taken = "broken.py, line 8: ValueError: attack 'ig' is taken by attacks.gradient_matching.ig"
    assert taken in script("imported_first", tmp_path, "broken.py")


def test_an_error_below_is_said_of_the_line_that_led_to_it(tmp_path):
    (tmp_path / "helped.py").write_text("\n\nimport helper\n")
    (tmp_path / "helper.py").write_text("raise RuntimeError('rain')")
    with pytest.raises(ValueError, match=r"helped\.py, line 3: RuntimeError: rain"):
        plugins.import_plugins(["helped.py"])


def test_the_hash_of_the_source_knows_imported_files(own):
    before = cache_keys.source_digest()
    plugins.import_plugins(["own_attack.py"])
    mine = cache_keys.source_digest()
    assert mine != before
    plugins._sources["own_attack"] += b"\n"
    assert len({before, mine, cache_keys.source_digest()}) == 3


def test_a_runs_name_does_not_tell_where_its_modules_lie(own):
    found = yaml_config.read(settings(imports="own_attack.py"))
    elsewhere = yaml_config.read({**yaml_config.to_plain(found), "imports": ["own_attack"]})
    assert found != elsewhere
    assert cache_keys.run_id(found) == cache_keys.run_id(elsewhere)


def test_commands_import(own, tmp_path):
    (tmp_path / "tiny.yaml").write_text(yaml12.dump(settings()))
    words = ("--device", "cpu", "--out", "out", "--without", "hyperfl")
    assert "unknown attack 'own-attack'" in call("run", "tiny.yaml", *words).output
    assert "own-attack\tGuesses gray" in call("list", "attacks", "--import", own).output
    assert "Nobody et al., 2020" in call("show", "own-attack", "--import", own).output
    assert call("run", "tiny.yaml", "--import", own, *words).exit_code == 0
    assert yaml12.parse((tmp_path / "out" / "config.yaml").read_text())["imports"] == ["own_attack.py"]
    assert json.loads((tmp_path / "out" / "run.json").read_text())["code"] == cache_keys.source_digest()
    again = call("run", "out/config.yaml", "--device", "cpu")
    assert again.exit_code == 0
    assert "warning" not in again.output
    with own.open("a") as file:
        file.write("# changed\n")
    plugins._sources["own_attack"] = own.read_bytes()  # as a new process reads it
    assert "finished cells are of other source code" in call("run", "out/config.yaml", "--device", "cpu").output


def test_audits_import(own, tmp_path):
    words = ("audit", "--method", "fedavg", "--dataset", "faces", "--attack", "own-attack", "--count", "2")
    found = call(*words, "--import", own, "--device", "cpu", "--out", "out", "--workers", "1")
    assert found.exit_code == 0, found.output
    assert "own-attack: " in found.output
    assert yaml12.parse((tmp_path / "out" / "config.yaml").read_text())["imports"] == ["own_attack.py"]


@pytest.mark.parametrize("words", [["--import", "/elsewhere/own.py"], ["--import=/elsewhere/own.py"]])
def test_the_command_that_is_kept_tells_no_folder(words):
    assert "elsewhere" not in terminal.shareable_command(["run", "quickstart", *words], "quickstart")
    assert "own.py" in terminal.shareable_command(["run", "quickstart", *words], "quickstart")


def test_settings_of_the_command_line_import_nothing(tmp_path):
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    with pytest.raises(ValueError, match="modules are given by --import"):
        yaml_config.load(tmp_path / "tiny.yaml", ["imports=[os]"])


def test_worker_processes_find_imported_files(own, monkeypatch):
    plugins.import_plugins([str(own)])
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
    views = [from_batch(model, torch.full((1, 1, 4, 4), 0.5), torch.tensor([0]))[0] for _ in range(6)]
    here = parallel._run_here

    def slowly(*given):
        time.sleep(1.0)
        return here(*given)

    monkeypatch.setattr(parallel, "_run_here", slowly)
    processes = parallel.AttackPool(2, patience=0.0)
    try:
        processes._ready_pool().result()
        found = processes.run(attacks.build("own-attack"), views, range(6))
    finally:
        processes.close()
    assert {int(one.private["process"]) == os.getpid() for one in found} == {True, False}


def test_show_finds_what_a_config_imports_from_elsewhere(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "own_attack.py").write_text(ATTACK)
    (tmp_path / "c.yaml").write_text(f"imports: [own_attack.py]\n{CONFIG.replace('- guess', '- own-attack')}")
    assert "--import own_attack.py runs it" in call("show", "c.yaml").output
    assert "own-attack" in call("show", "c.yaml", "--import", other / "own_attack.py").output


def test_nothing_that_a_config_imports_runs_to_show_it(tmp_path):
    (tmp_path / "spy.py").write_text("from pathlib import Path\nPath('ran').touch()\n" + ATTACK)
    (tmp_path / "c.yaml").write_text(f"imports: [spy.py]\n{CONFIG.replace('- guess', '- own-attack')}")
    shown = call("show", "c.yaml")
    assert shown.exit_code == 0
    assert "own-attack" in shown.output  # what it says of itself
    assert "fedavg" in shown.output
    assert "its own code is not run" in shown.output
    assert json.loads(call("show", "c.yaml", "--json").stdout)[0]["unread"] == ["spy.py"]
    assert not (tmp_path / "ran").exists()
    assert "cells: " in call("show", "c.yaml", "--import", "spy.py").output
    assert (tmp_path / "ran").exists()


def test_a_run_says_whose_code_it_runs(tmp_path):
    (tmp_path / "broken.py").write_text("raise RuntimeError('stop')\n")
    (tmp_path / "c.yaml").write_text(f"imports: [broken.py]\n{CONFIG}")
    ran = call("run", "c.yaml")
    assert ran.exit_code == 2
    note, error = ran.stderr.splitlines()
    assert note == "note: runs the code of broken.py, which c.yaml imports"
    assert error.startswith("error: c.yaml: broken.py, line 1")
    assert "runs the code" not in call("run", "c.yaml", "--import", "broken.py").stderr
