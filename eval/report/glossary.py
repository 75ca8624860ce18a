"""What a configuration's names stand for, and whom to cite for them: from the classes they are registered for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from eval.experiment.docstrings import citations, summarize
from eval.report.settings import RunSettings, Spec, section
from fl.registry import Registry, UnknownNameError


def papers_to_cite(setting: RunSettings) -> list[tuple[str, str]]:
    """Return what to cite: (name, papers) of everything in the configuration that names a paper."""
    found: dict[str, str] = {}
    for registry, name in _names(setting):
        entry = _entry(registry, name)
        if isinstance(entry, type) and (cited := citations(entry)):
            found.setdefault(name, "; ".join(cited))
    return list(found.items())


def glossary(setting: RunSettings) -> list[tuple[str, str]]:
    """Return what every method, defense and attack does, in a sentence, by label."""
    from attacks.base import attacks
    from defenses import defenses
    from fl.method import methods

    entries = []
    for kind, registry, specs in (
        ("method", methods, setting.methods),
        ("defense", defenses, setting.defenses),
        ("attack", attacks, setting.attacks),
    ):
        for name, spec in specs.items():
            if kind == "defense" and spec.get("name") == "none":
                continue
            parts = [summarize(entry) for part in _parts(spec) if (entry := _entry(registry, part)) is not None]
            entries.append((f"{kind} {name}", "; then ".join(filter(None, parts)) or "not known to this version"))
    return entries


def _names(setting: RunSettings) -> Iterator[tuple[Registry[Any], str]]:
    """Return every name in the configuration with the registry it belongs to."""
    from attacks.base import attacks
    from defenses import defenses
    from fl.data import datasets
    from fl.data.partitions.partition import partitions
    from fl.method import methods
    from fl.models import models
    from fl.parametrization import parametrizations

    for key, registry in (("dataset", datasets), ("model", models)):
        yield registry, str(setting.section("task", key).get("name", ""))
    yield partitions, str(setting.section("federation", "partition").get("name", ""))
    for spec in setting.methods.values():
        yield methods, str(spec.get("name", ""))
        yield parametrizations, str(section(spec, "parametrization").get("name", ""))
    for spec in setting.defenses.values():
        yield defenses, str(spec.get("name", ""))
    for spec in setting.attacks.values():
        for part in _parts(spec):
            yield attacks, part


def _parts(spec: Spec) -> list[str]:
    """Return the registered names in an entry; a chain has two or more."""
    if spec.get("name") == "chain":
        return [name for part in ("first", "then") for name in _parts(section(spec, part))]
    return str(spec.get("name", "")).split("+")


def _entry(registry: Registry[Any], name: str) -> Any:
    try:
        return registry.get(name)
    except UnknownNameError:
        return None
