"""What a report needs of a configuration, read from plain data so that an old or a foreign one will do."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from defenses import defenses
from eval.experiment.serialization import with_current_names
from fl.settings import FormerNameWarning

Spec = Mapping[str, Any]


@dataclass(frozen=True)
class RunSettings:
    """The configuration of a run.

    Attributes:
        plain: all of it.
        methods: settings of the methods, by label.
        defenses: likewise.
        attacks: likewise.
        threat: what the attacker was assumed to know.
    """

    values: Spec
    methods: dict[str, Spec] = field(default_factory=dict)
    defenses: dict[str, Spec] = field(default_factory=dict)
    attacks: dict[str, Spec] = field(default_factory=dict)
    threat: Spec = field(default_factory=dict)

    @classmethod
    def from_plain(cls, plain: Any) -> RunSettings:
        """Return the setting in plain data (a parsed `config.yaml`).

        Raises:
            ValueError: it is no mapping.
        """
        if not isinstance(plain, Mapping):
            raise ValueError(f"expected settings (key: value), got {type(plain).__name__}")
        with warnings.catch_warnings():  # whoever reads a finished run can't change its config
            warnings.simplefilter("ignore", FormerNameWarning)
            plain = with_current_names(plain)
        methods, defenses, attacks = (_entries(plain.get(key)) for key in ("method", "defense", "attack"))
        return cls(plain, methods, defenses, attacks, section(plain, "threat"))

    @property
    def title(self) -> str:
        """Return what the run calls itself, or nothing."""
        return str(self.values.get("title") or "")

    @property
    def published(self) -> list[Spec]:
        """Return figures of papers to set beside those of the run."""
        listed = self.values.get("published")
        return [item for item in listed if isinstance(item, Mapping)] if isinstance(listed, list) else []

    def section(self, *keys: str) -> Spec:
        """Return the settings under nested keys; empty where there are none."""
        return section(self.values, *keys)

    def defense_name(self, defense: str) -> str:
        """Return the registered name of the defense with this label."""
        return str(self.defenses.get(defense, {}).get("name", defense))

    def group_size(self, defense: str) -> int:
        """Return how many clients' mean, at least, the server sees alone; 1 for a defense not known here."""
        spec = {key: value for key, value in self.defenses.get(defense, {}).items() if key != "as"}
        try:
            return defenses.build(spec).group_size
        except ValueError:
            return 1

    @property
    def lpips_asked(self) -> bool:
        """Return whether LPIPS was asked for by name, so that its absence is worth a flag."""
        return self.section("score").get("lpips", "auto") not in {"auto", "off"}


def section(plain: Spec, *keys: str) -> Spec:
    """Return the mapping under nested keys; empty where there is none."""
    for key in keys:
        inner = plain.get(key)
        plain = inner if isinstance(inner, Mapping) else {"name": inner} if isinstance(inner, str) else {}
    return plain


def entry_label(spec: Spec) -> str:
    """Return what an entry is called in results."""
    if "as" in spec:
        return str(spec["as"])
    if spec.get("name") == "chain" and "first" in spec:  # of attacks
        return "+".join(entry_label(section(spec, part)) for part in ("first", "then"))
    return str(spec.get("name", ""))


def _entries(value: Any) -> dict[str, Spec]:
    listed = value if isinstance(value, list) else [] if value is None else [value]
    specs = [item if isinstance(item, Mapping) else {"name": str(item)} for item in listed]
    return {entry_label(spec): spec for spec in specs}
