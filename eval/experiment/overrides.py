"""A config's settings changed one after the other, as a command line gives them, before its grid is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from eval.experiment import sweep as grid
from eval.experiment.selection import with_published_figures
from eval.experiment.serialization import check_mapping, current_keys, resolve_paths, to_plain
from eval.experiment.spec import Experiment, Published
from eval.io import yaml12
from fl.registry import UnknownNameError


@dataclass(frozen=True)
class ConfigDraft:
    """What a config says, in the parts that changes go to.

    Attributes:
        experiment: without grid and published figures.
        sweep: the grid.
        published: figures, some of which may be of entries that are there no more.
    """

    experiment: Experiment
    sweep: Mapping[str, Any]
    published: tuple[Published, ...]

    def with_override(self, text: str) -> ConfigDraft:
        """Return the draft with one override: `key=value`; a single value for a swept key becomes all that is swept.

        Raises:
            UnknownNameError: nothing has such a setting; says what is close.
            ValueError: it does not fit.
        """
        keys, value = grid.parse_override(text)
        if keys[0] == "imports":
            raise ValueError(f"{text}: modules are given by --import")
        if keys[0] == "sweep":
            return replace(self, sweep=self._swept(keys[1:], _value(value, text), text))
        if keys[0] == "published":
            whole, _ = with_published_figures(self.experiment, self.published, swept=False)
            return replace(self, published=grid.override(whole, text).published)
        keys = self._as_swept(keys)
        key, covered = ".".join(keys), self._overlapping_sweeps(keys)
        if covered:  # it goes before what a sweep of some of these settings says
            left = {name: values for name, values in self.sweep.items() if name not in covered}
            return replace(self, sweep=left).with_override(text)
        if (several := grid.sweep_override(self.experiment, text)) is not None:
            return replace(self, sweep={**self.sweep, key: next(iter(several.values()))})
        changed = grid.override(self.experiment, text)
        if key in self.sweep and isinstance(single := _value(value, text), grid.Scalar):
            return replace(self, sweep={**self.sweep, key: [single]})  # the labels stay, and what is published of them
        return replace(self, experiment=changed, sweep={k: v for k, v in self.sweep.items() if k != key})

    def _as_swept(self, keys: Sequence[str]) -> list[str]:
        """Return the keys as the sweep writes them, by whichever of a setting's names; else as given."""
        meant = current_keys(self.experiment, keys)
        swept = (name.split(".") for name in self.sweep)
        return next((own for own in swept if current_keys(self.experiment, own) == meant), [*keys])

    def _overlapping_sweeps(self, keys: Sequence[str]) -> set[str]:
        """Return the sweeps, under other keys, of settings that `keys` names as well.

        Raises:
            ValueError: of a sweep it names some, not all.
        """
        data, found = to_plain(self.experiment), set[str]()
        keys = current_keys(self.experiment, keys)
        for name in self.sweep:
            own = current_keys(self.experiment, name.split("."))
            if own == keys or own[-1] != keys[-1] or own[0] != keys[0]:
                continue
            mine, theirs = (resolve_paths(data, part) for part in (keys, own))
            shared = [place for place in theirs if any(place is other for other in mine)]
            if shared and len(shared) < len(theirs):
                raise ValueError(f"{'.'.join(keys)}: the sweep {name!r} has values for this and for more; set {name}")
            if shared:
                found.add(name)
        return found

    def _swept(self, keys: Sequence[str], value: Any, text: str) -> dict[str, Any]:
        if not keys:
            return dict(check_mapping(value, text))
        key = ".".join(self._as_swept(keys))
        if value in (None, []) and key not in self.sweep:
            raise UnknownNameError("sweep", key, sorted(self.sweep))
        rest = {name: values for name, values in self.sweep.items() if name != key}
        return rest if value in (None, []) else {**rest, key: value}


def apply_overrides(state: ConfigDraft, overrides: Sequence[str]) -> ConfigDraft:
    """Return the state after the overrides, in their order; one that does not fit yet waits for the others.

    The experiment is built after each of them, not once after all: what one names (`defense=noise`) has its settings
    only then, and the next may change them (`defense.std=0.1`).

    When the turn of one that waited comes, those given after it are applied once more: they go before it.

    Raises:
        ValueError: one does not fit even then.
    """
    waiting, fit = list(range(len(overrides))), set[int]()
    while waiting:
        refused: dict[int, ValueError] = {}
        for i in waiting:
            try:
                again = [overrides[j] for j in (i, *sorted(k for k in fit if k > i))]
                state = reduce(ConfigDraft.with_override, again, state)
            except ValueError as error:
                refused[i] = error
            else:
                fit.add(i)
        if len(refused) == len(waiting):
            raise next(iter(refused.values()))
        waiting = list(refused)
    return state


def _value(text: str, where: str) -> Any:
    try:
        return yaml12.parse(text)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
