"""Experiments in YAML: read strictly, overridden by dotted keys, spread over a grid, written back in full.

```yaml
title: Faces, one image at a time
task: {dataset: faces, model: hyperfl-grey}
federation: {partition: {name: iid, clients: 4}, rounds: 5}
method:                                  # one or several; `as` gives an entry its own label
  - {name: fedavg, lr: 0.05}
  - {name: hyperfl, parametrisation: {name: hypernetwork, init: scaled}}
defense: none                            # every method is trained under every defence
attack:                                  # `against` names the methods it is run on; without any: accuracy and cost
  - {name: ig, against: fedavg}
  - peel+ig
threat: {knows_labels: false}            # what the server knows beside the update
observe: {images: 8, batch_size: 1, method: {steps: 1, head_epochs: 0}}
seeds: [0]
score: {lpips: auto}
published:                               # a paper's figures, for the report to set beside ours
  - {method: fedavg, attack: ig, psnr: 16.16, source: "HyperFL, Table 3"}
sweep: {attack.ig.tv: [1e-4, 1e-2]}      # each value becomes an entry of its own (see `eval.grid`)
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from eval import grid, yamlfile
from eval.experiment import Experiment, check_taken
from eval.grid import override
from eval.plain import build, mapping, plain

__all__ = ["dump", "load", "override", "plain", "read"]


def load(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """The experiment in a YAML file, with `key=value` overrides (see `eval.grid`).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: not an experiment; says which key is wrong and what would be right.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no config file {path}")
    try:
        data = yamlfile.parse(path.read_text(encoding="utf-8"))
        experiment, sweep = _split(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return grid.spread(*_overridden(experiment, sweep, overrides))


def _overridden(
    experiment: Experiment, sweep: Mapping[str, Any], overrides: Sequence[str]
) -> tuple[Experiment, Mapping[str, Any]]:
    """Experiment and sweep after the overrides, in their order; one that does not fit yet waits for the others.

    When its turn comes, those given after it are applied once more: they go before it.
    """
    state = experiment, sweep
    waiting, fit = list(range(len(overrides))), set[int]()
    while waiting:
        refused: dict[int, ValueError] = {}
        for i in waiting:
            try:
                state = reduce(_with, [overrides[j] for j in (i, *sorted(k for k in fit if k > i))], state)
            except ValueError as error:
                refused[i] = error
            else:
                fit.add(i)
        if len(refused) == len(waiting):
            raise next(iter(refused.values()))
        waiting = list(refused)
    return state


def _with(state: tuple[Experiment, Mapping[str, Any]], text: str) -> tuple[Experiment, Mapping[str, Any]]:
    """Experiment and sweep after one override, which takes the place of a sweep over the same key."""
    experiment, sweep = state
    several = grid.several(experiment, text)
    if several is not None:
        return experiment, {**sweep, **several}
    key = text.partition("=")[0].strip()
    return override(experiment, text), {name: values for name, values in sweep.items() if name != key}


def read(data: Any) -> Experiment:
    """The experiment that plain data (a parsed YAML document) describes.

    Raises:
        ValueError: as `load`.
    """
    return grid.spread(*_split(data))


def dump(experiment: Experiment) -> str:
    """The experiment as YAML with every default written out, always the same for equal experiments."""
    return yamlfile.dump(plain(experiment))


def _split(data: Any) -> tuple[Experiment, dict[str, Any]]:
    """The experiment without its sweep, and the sweep."""
    values = dict(mapping(data, "the config"))
    sweep = dict(mapping(values.pop("sweep", {}), "sweep"))
    experiment = build(values)
    given = values["method"] if isinstance(values["method"], list) else [values["method"]]
    for settings, taken in zip(given, plain(experiment)["method"], strict=True):
        for name in settings if isinstance(settings, dict) else ():
            check_taken(settings[name], taken.get(name, settings[name]), f"method.{taken['name']}.{name}")
    return experiment, sweep
