"""What a wheel holds beside modules: all that code reads at run time."""

import tomllib
from pathlib import Path

from eval.experiment import config_catalog

ROOT = Path(__file__).parents[2]
BUILD = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]


def shipped(path):
    """Where a file of the checkout lies in the wheel, or None."""
    for source, target in BUILD["force-include"].items():
        if path.is_relative_to(ROOT / source):
            return Path(target) / path.relative_to(ROOT / source)
    inside = path.relative_to(ROOT)
    return inside if inside.parts[0] in BUILD["only-include"] else None


def test_configs_are_where_an_installation_looks_for_them():
    installed = Path(config_catalog.__file__).parent.relative_to(ROOT) / "configs"
    for name in config_catalog.list_config_names():
        assert shipped(config_catalog.CONFIGS / f"{name}.yaml") == installed / f"{name}.yaml"


def test_every_package_is_shipped_with_its_templates_and_types():
    for package in BUILD["packages"]:
        assert shipped(ROOT / package / "py.typed") is not None
        assert (ROOT / package / "py.typed").is_file()
    templates = [*(ROOT / "eval" / "report" / "templates").iterdir()]
    assert templates
    assert all(shipped(template) for template in templates)


def test_no_folder_of_a_checkout_is_installed_under_a_common_name():
    assert set(BUILD["packages"]) == {"hyperleak", "fl", "defenses", "attacks", "eval"}
    assert set(BUILD["only-include"]) == {*BUILD["packages"], "pytest_hyperleak.py"}
    assert all(target.startswith("eval/") for target in BUILD["force-include"].values())
