"""The schema of findings: what audits of all three kinds print follows it, and what does not is told."""

import copy
import json
from importlib import resources

import pytest
from support.json_schema import CLOSED, FINDINGS, faults
from support.tiny import Registered
from typer.testing import CliRunner

from eval import cli
from eval.audit.findings import SCHEMA_VERSION, AttackFinding
from eval.experiment import plugins  # names of tests' own attacks are looked up, not read off the source

SMALL = ("--dataset", "{name: faces, size: 8}", "--model", "tiny", "--count", 1)
HYPERFL = "{name: hyperfl, parametrization: {name: hypernetwork, embedding: 3, hidden: 6, init: scaled}}"


def audit(*words):
    assert plugins
    with Registered():
        return CliRunner().invoke(cli.app, ["audit", *map(str, words), "--device", "cpu", "--json"])


@pytest.fixture(scope="module")
def found():
    """What the audit of a method prints whose attacks came to three different ends."""
    result = audit(
        "method", HYPERFL, *SMALL, *(word for name in ("peel", "guess", "refuse") for word in ("--attack", name))
    )
    assert result.exit_code in {0, 4}, result.output
    return json.loads(result.stdout)


def test_a_method_says_what_it_is_a_version_of(found):
    assert found["schema_version"] == SCHEMA_VERSION
    assert not faults(found, CLOSED, CLOSED)
    (peel, *_) = found["findings"]
    assert peel["private"]["embedding"] == {"recovered": 1, "updates": 1}
    kinds = {(one["rule"], one["attack"], one["allowed"]) for one in found["leaks"]}
    assert ("private-tensor", "peel", False) in kinds


def test_a_limit_follows_it_too():
    result = audit("method", "fedavg", *SMALL, "--attack", "guess", "--max-psnr", 1)
    assert result.exit_code == 3, result.output
    found = json.loads(result.stdout)
    assert not faults(found, CLOSED, CLOSED)
    assert [one["rule"] for one in found["leaks"]] == ["limit-exceeded"]
    assert " dB (best guess " in found["leaks"][0]["words"]


def test_a_failed_attack_follows_it_too_in_the_folder(tmp_path):
    result = audit("method", "fedavg", *SMALL, "--attack", "crash", "--attack", "refuse", "--out", tmp_path / "kept")
    assert result.exit_code == 1, result.output
    assert not faults(json.loads(result.stdout), CLOSED, CLOSED)
    kept = json.loads((tmp_path / "kept" / "audit.json").read_text())
    assert not faults(kept, CLOSED, CLOSED)
    assert not {"limits", "leaks"} & kept.keys()
    assert kept["findings"][0]["traceback"].startswith("cells/")


@pytest.mark.parametrize(
    "change",
    [
        lambda told: told.pop("schema_version"),
        lambda told: told.update(schema_version="2.0"),
        lambda told: told.update(schema_version=1),
        lambda told: told.pop("leaks"),
        lambda told: told.update(max_psnr="high"),
        lambda told: told.update(above=["mse"]),
        lambda told: told["limits"].update(ssim=2),
        lambda told: told["leaks"][0].update(rule="other"),
        lambda told: told["leaks"][0].update(update="0"),
        lambda told: told["findings"][0].pop("verdict"),
        lambda told: told["findings"][0].update(leaked=0),
        lambda told: told["findings"][0]["outcomes"][0].update(kind="lost"),
        lambda told: told["findings"][0]["outcomes"][0].update(update=[0, 1]),
        lambda told: told["findings"][0]["private"]["embedding"].update(recovered=-1),
        lambda told: told["findings"][0]["images"][0].update(floor_mean_psnr="low"),
        lambda told: told["findings"][0]["images"][0].update(psnr=True),
        lambda told: told["findings"].append({}),
    ],
)
def test_what_does_not_follow_it_is_told(found, change):
    wrong = copy.deepcopy(found)
    change(wrong)
    assert faults(wrong)


def test_a_reader_takes_what_a_later_version_adds(found):
    later = {**found, "schema_version": "1.7", "news": 1}
    assert not faults(later)
    assert faults(later, CLOSED, CLOSED) == ["$: unknown 'news'"]


def test_the_schema_is_shipped_and_names_every_property(found):
    text = resources.files("eval.audit").joinpath("findings.schema.json").read_text(encoding="utf-8")
    assert json.loads(text) == FINDINGS
    assert {*FINDINGS["properties"]} == {*found}
    assert {*FINDINGS["$defs"]["finding"]["properties"]} == {*found["findings"][0]}
    assert {*FINDINGS["$defs"]["finding"]["required"]} == {*found["findings"][0]}
    assert {"attack", "failed", "traceback"} <= {*AttackFinding.__dataclass_fields__}
    assert SCHEMA_VERSION.partition(".")[0] == FINDINGS["$id"].rpartition(":")[2]


def test_another_validator_says_the_same(found):
    validators = pytest.importorskip("jsonschema")
    validator = validators.Draft202012Validator
    validator.check_schema(FINDINGS)
    assert not list(validator(CLOSED).iter_errors(found))
    assert list(validator(FINDINGS).iter_errors({**found, "schema_version": "2.0"}))
    assert list(validator(FINDINGS).iter_errors({key: one for key, one in found.items() if key != "leaks"}))
