"""Experiments in YAML: read strictly, overridden by dotted keys, spread over a grid, written back in full.

```yaml
title: Faces, one image at a time
imports: [my_attacks.py]                 # modules of one's own that register what is named below; none by default
task: {dataset: faces, model: hyperfl-grey}
federation: {partition: {name: iid, clients: 4}, rounds: 5}
method:                                  # one or several; `as` gives an entry its own label
  - {name: fedavg, lr: 0.05}
  - {name: hyperfl, parametrization: {name: hypernetwork, init: scaled}}
defense: none                            # every method is trained under every defense
attack:                                  # `against` names the methods it is run on; without any: accuracy and cost
  - {name: ig, against: fedavg}
  - peel+ig
threat: {knows_labels: false}            # what the server knows beside the update
observe: {images: 8, batch_size: 1, method: {steps: 1, head_epochs: 0}}
seeds: [0]
score: {lpips: auto}
published:                               # a paper's figures, for the report to set beside ours
  - {method: fedavg, attack: ig, psnr: 16.16, source: "HyperFL, Table 3"}
executor: {name: slurm, partition: gpu}  # what computes it, if not this process; no part of the experiment
sweep: {attack.ig.tv_weight: [1e-4, 1e-2]}  # each value becomes an entry of its own (see `eval.experiment.sweep`)
```
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eval.experiment import sweep as grid
from eval.experiment.capture_spec import CaptureSpec
from eval.experiment.overrides import ConfigDraft, apply_overrides
from eval.experiment.plugins import (
    import_plugins,
    not_on_command_line,
    recorded_module_folder,
    search_modules_in,
)
from eval.experiment.scales import parse_scales
from eval.experiment.selection import select_entries, with_published_figures
from eval.experiment.serialization import build, check_mapping, to_plain, with_current_names
from eval.experiment.spec import Experiment, check_not_overruled
from eval.experiment.sweep import override
from eval.io import yaml12
from eval.io.sanitize import shorten

__all__ = ["dump", "load", "override", "read", "to_plain"]
log = logging.getLogger(__name__)


def load(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    imports: Sequence[str] = (),
    without: Sequence[str] = (),
    only: Sequence[str] = (),
    note: Callable[[str], None] = log.warning,
    asked: Callable[[Sequence[str]], bool] = lambda _import_words: True,
) -> Experiment:
    """Return the experiment in a YAML file, changed as the command line asks for; runs the code that it `imports`.

    Args:
        path: of the file.
        overrides: `key=value` (see `eval.experiment.overrides`).
        imports: further modules of the user's own (see `eval.experiment.plugins`).
        without: labels of entries to leave out (see `eval.experiment.selection`).
        only: labels of the entries to keep.
        note: told of published figures that are left out with what they are of.
        asked: told of the modules that the file imports and `imports` doesn't, before any of their code runs; whether
            it may.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: not an experiment; says which key is wrong and what would be right.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no config file {path}")
    try:
        data = yaml12.parse(yaml12.read(path))
        experiment, sweep = _split(data, path.parent, imports, asked)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not (overrides or without or only):
        return grid.expand_sweep(experiment, sweep)
    changed = apply_overrides(ConfigDraft(replace(experiment, published=()), sweep, experiment.published), overrides)
    found, lost = with_published_figures(
        select_entries(grid.expand_sweep(changed.experiment, changed.sweep), without, only), changed.published
    )
    if lost:
        note(f"published figures of what is not run are left out: {', '.join(lost)}")
    return found


def read(data: Any, *, imports: Sequence[str] = ()) -> Experiment:
    """Return the experiment that plain data (a parsed YAML document) describes; imports what it `imports`.

    Args:
        data: the document.
        imports: files that are imported in place of those of the same name in `data`.

    Raises:
        ValueError: as `load`.
    """
    return grid.expand_sweep(*_split(data, given=imports))


def executor_section(config: Path | Mapping[str, Any]) -> dict[str, Any]:
    """Return what a config says under `executor`: options by their names, and `name` where it is given.

    Raises:
        ValueError: it is neither a name nor a mapping.
    """
    data = yaml12.parse(yaml12.read(config)) if isinstance(config, Path) else config
    found = check_mapping(data, "the config").get("executor", {})
    return {"name": found} if isinstance(found, str) else dict(check_mapping(found, "executor"))


def dump(experiment: Experiment | CaptureSpec) -> str:
    """Return the experiment as YAML with every default written out, always the same for equal experiments."""
    return yaml12.dump(to_plain(experiment))


def _split(
    data: Any,
    folder: Path = Path(),
    given: Sequence[str] = (),
    asked: Callable[[Sequence[str]], bool] = lambda _import_words: True,
) -> tuple[Experiment, dict[str, Any]]:
    """Return the experiment without its sweep, and the sweep."""
    values = dict(check_mapping(data, "the config"))
    words = _import_words(values.get("imports", []))
    own = not_on_command_line(words, given)
    values["imports"] = list(import_plugins(words if not own or asked(own) else [], folder, given))
    values.pop("executor", None)  # changes no number (`executor_section`)
    sweep = dict(check_mapping(values.pop("sweep", {}), "sweep"))
    parse_scales(values.pop("scales", {}))  # what `hyperleak reproduce` makes of it
    values = with_current_names(values)
    experiment = grid.with_current_labels(build(values), sweep)
    if experiment.task.model.user_code:
        search_modules_in(folder)
        if recorded := recorded_module_folder(folder):  # the config is a run's own, which lies elsewhere
            search_modules_in(Path(recorded))
    given = values["method"] if isinstance(values["method"], list) else [values["method"]]
    for settings, taken in zip(given, to_plain(experiment)["method"], strict=True):
        for name in settings if isinstance(settings, dict) else ():
            check_not_overruled(settings[name], taken.get(name, settings[name]), f"method.{taken['name']}.{name}")
    return experiment, sweep


def _import_words(value: Any) -> list[str]:
    words = value if isinstance(value, list) else [value]
    if not all(isinstance(word, str) for word in words):
        raise ValueError(f"imports: expected files or modules such as my_attack.py, got {shorten(repr(value), 200)}")
    return words
