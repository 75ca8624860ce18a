"""Parts of an experiment: some of its methods, defenses and attacks, and the published figures of these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from eval.experiment.spec import Entry, Experiment, Published, find_unknown_label
from fl.method import methods
from fl.registry import UnknownNameError

KINDS = ("method", "defense", "attack")


def select_entries(experiment: Experiment, without: Sequence[str] = (), only: Sequence[str] = ()) -> Experiment:
    """Return the experiment without some entries, and without attacks on nothing else than these.

    Args:
        experiment: after its sweep, without published figures.
        without: labels of methods, defenses or attacks, as they stand in the config or as a sweep has made them.
        only: likewise; of a kind that one of them is of, these alone stay.

    Raises:
        UnknownNameError: nothing is called so; says what is close.
        ValueError: no method or no defense is left.
    """
    if not without and not only:
        return experiment
    entries: dict[str, tuple[Entry[Any], ...]] = {kind: getattr(experiment, kind) for kind in KINDS}
    known = {name for own in entries.values() for entry in own for name in _names(entry)}
    for label in (*without, *only):
        if label not in known:
            raise UnknownNameError("label", label, sorted(known))
    kept: dict[str, Any] = {kind: _kept(own, set(without), set(only)) for kind, own in entries.items()}
    if empty := [kind for kind in ("method", "defense") if not kept[kind]]:
        raise ValueError(f"expected at least one {empty[0]} to be left, got none")
    kept["attack"] = _against({entry.label for entry in kept["method"]}, kept["attack"])
    return _with_settings_left(experiment, kept)


def with_published_figures(
    experiment: Experiment, published: Iterable[Published], *, swept: bool = True
) -> tuple[Experiment, list[str]]:
    """Return the experiment with the figures that are of its entries, and the labels of which others are.

    Args:
        experiment: without figures.
        published: what a config says.
        swept: as in `eval.experiment.spec.check_published`.
    """
    fits, lost = list[Published](), list[str]()
    for figures in published:
        found = find_unknown_label(experiment, figures, swept=swept)
        if found is None:
            fits.append(figures)
        else:
            lost.append(found[1])
    return replace(experiment, published=tuple(fits)), list(dict.fromkeys(lost))


def _names(entry: Entry[Any]) -> set[str]:
    """Return an entry's label, and that of what a sweep made it of."""
    return {entry.label, entry.label.partition("@")[0]}


def _kept(entries: Sequence[Entry[Any]], without: set[str], only: set[str]) -> tuple[Entry[Any], ...]:
    chosen = [entry for entry in entries if _names(entry) & only] or entries
    return tuple(entry for entry in chosen if not _names(entry) & without)


def _against(left: set[str], attacks: Iterable[Entry[Any]]) -> tuple[Entry[Any], ...]:
    """Return the attacks on the methods that are left."""
    found = ((entry, tuple(label for label in entry.against if label in left)) for entry in attacks)
    return tuple(replace(entry, against=own) for entry, own in found if own or not entry.against)


def _with_settings_left(experiment: Experiment, kept: dict[str, Any]) -> Experiment:
    """Return the experiment without settings of the observed round that none of the remaining entries has."""
    own = {key for entry in kept["method"] for key in methods.spec(entry.item)}
    observed = {key: value for key, value in experiment.observe.method.items() if key in own}
    kept["observe"] = replace(experiment.observe, method=observed)
    return replace(experiment, **kept)
