"""What messages of Flower say of a client's training: the weights before and after, and how it trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from eval.audit.recorded_update import RecordedUpdate, TrainingFacts, usable_facts
from eval.federations.reply_checks import (
    Beside,
    UnreadableError,
    refuse_differences,
    refuse_no_weights,
    refuse_unseen,
)
from fl.runtime.native_arrays import to_tensor

CONFIG_NAMES: Mapping[str, tuple[str, ...]] = {
    "lr": ("lr", "learning-rate", "client-lr", "local-lr", "client-learning-rate"),
    "epochs": ("local-epochs", "epochs", "num-epochs", "num-local-epochs"),
    "steps": ("local-steps", "num-steps", "max-steps", "num-local-steps"),
    "batch_size": ("batch-size", "local-batch-size", "train-batch-size"),
    "optimizer": ("optimizer", "client-optimizer", "local-optimizer"),
    "momentum": ("momentum", "client-momentum"),
    "weight_decay": ("weight-decay",),
}
"""What apps call a fact of training in their config, as far as we know; underscores count as hyphens."""
EXAMPLES = ("num-examples", "num-samples", "num-train-examples")
"""What apps call the number of a client's examples among its metrics."""
ROUNDS = ("server-round", "current-round", "round")
PROXIMAL = ("proximal-mu",)
"""FedProx's penalty, which moves every local step but the first."""
OPTIMIZER_FACTS = ("optimizer", "momentum", "weight_decay")
"""Facts that are taken from one source together: a momentum means nothing without its optimizer."""


@dataclass(frozen=True)
class SentWeights:
    """What a client was sent, taken before training may change the message.

    Attributes:
        arrays: by the name of the record, then of the array.
        config: of all config records together, by name.
    """

    arrays: Mapping[str, Mapping[str, Array]]
    config: Mapping[str, Any]

    @classmethod
    def of(cls, content: RecordDict) -> SentWeights:
        """Return what a message brings."""
        arrays = {key: dict(record) for key, record in content.array_records.items()}
        return cls(arrays, _joined(content.config_records))


@dataclass(frozen=True, kw_only=True)
class UpdateReader:
    """Puts a client's reply and what it was sent together to an update with what is known of the training behind it.

    Attributes:
        training: facts that are known beforehand; they go before what messages say.
        run_config: of the app.
    """

    training: TrainingFacts = field(default_factory=TrainingFacts)
    run_config: Mapping[str, Any] = field(default_factory=dict)

    def read(
        self,
        sent: SentWeights,
        reply: RecordDict,
        *,
        origin: Mapping[str, str],
        watched: Mapping[str, Any] | None = None,
    ) -> RecordedUpdate:
        """Return the update that a reply carries.

        Args:
            sent: what the client started from.
            reply: its answer.
            origin: where the update comes from, for reports.
            watched: what was seen of the optimizer (`OptimizerWatch.facts`).

        Raises:
            UnreadableError: the reply has more or less than one record of arrays, or one that does not fit what was
                sent, or seems to be a difference, or more beside it than may leave unseen.
        """
        beside = refuse_unseen(_other_records(reply))
        key, ended = _only_record(reply)
        begun = _matching_record(sent, key, ended)
        types = {name: array.dtype for name, array in begun.items()} | {name: a.dtype for name, a in ended.items()}
        before = {name: _tensor(name, array, as_sent=types[name]) for name, array in begun.items()}
        after = {name: _tensor(name, array, as_sent=array.dtype) for name, array in ended.items()}
        for name, value in after.items():
            if value.shape != before[name].shape:
                shapes = f"{tuple(before[name].shape)}, got {tuple(value.shape)}"
                raise UnreadableError(f"expected {name!r} in the shape that was sent, {shapes}")
        refuse_no_weights(before, after)
        refuse_differences(before, after)
        training, sources = self._facts(sent, reply, watched or {})
        said = {"facts": sources, "beside the update, not looked at": beside.words}
        said = {name: words for name, words in said.items() if words}
        return RecordedUpdate(before=before, after=after, training=training, origin={**origin, **said})

    def _facts(self, sent: SentWeights, reply: RecordDict, watched: Mapping[str, Any]) -> tuple[TrainingFacts, str]:
        """Return the facts of training, and where each comes from, in words."""
        given = {f.name: getattr(self.training, f.name) for f in fields(TrainingFacts)}
        examples = _look_up(_joined(reply.metric_records), EXAMPLES)
        sources: list[tuple[str, Mapping[str, Any]]] = [
            ("given", _only_known(given)),
            ("seen of the optimizer", usable_facts(watched)),
            ("message", _facts_of(sent.config)),
            ("run config", _facts_of(self.run_config)),
            ("metrics", {} if examples is None else usable_facts({"examples": examples})),
        ]
        found: dict[str, Any] = {}
        origins: dict[str, str] = {}
        for place, facts in sources:
            settled = "optimizer" in found
            for name, value in facts.items():
                if name not in found and not (name in OPTIMIZER_FACTS and settled):
                    found[name], origins[name] = value, place
        if found.get("batch_size") and found.get("examples"):
            found["batch_size"] = min(found["batch_size"], found["examples"])
        if _look_up({**self.run_config, **sent.config}, PROXIMAL) and found.get("steps") != 1:
            found["optimizer"], origins["optimizer"] = None, "not plain: FedProx"
        by_place = {
            place: [name for name in found if origins[name] == place] for place in dict.fromkeys(origins.values())
        }
        return TrainingFacts(**found), "; ".join(f"{place}: {', '.join(names)}" for place, names in by_place.items())


def round_of(message: Message) -> str:
    """Return the number of the server's round as text, or "" where the message does not say."""
    found = _look_up(_joined(message.content.config_records), ROUNDS)
    return str(message.metadata.group_id or "") if found is None else str(found)


def with_arrays(reply: RecordDict, recorded: RecordedUpdate, after: Mapping[str, Tensor]) -> bool:
    """Replace the arrays of a reply by others, each in the type of numbers that it had; those that stay are kept.

    Returns:
        True, once they are replaced.
    """
    key, record = _only_record(reply)
    arrays = {}
    for name, array in record.items():
        same = after[name] is recorded.after[name] or torch.equal(after[name], recorded.after[name])
        arrays[name] = array if same else Array(after[name].detach().numpy().astype(array.numpy().dtype))
    reply[key] = ArrayRecord(arrays)
    return True


def carries_numbers(reply: RecordDict) -> bool:
    """Return whether a reply has arrays, or else what may hold examples."""
    return bool(reply.array_records) or bool(Beside.of(_other_records(reply)).excess)


def _other_records(reply: RecordDict) -> dict[str, dict[str, Any]]:
    """Return the metrics and configs of a reply by name, which no attack looks at."""
    return {name: dict(record) for name, record in [*reply.metric_records.items(), *reply.config_records.items()]}


def _only_record(reply: RecordDict) -> tuple[str, ArrayRecord]:
    records = reply.array_records
    if len(records) != 1:
        raise UnreadableError(
            f"expected a reply with one record of arrays, got {len(records)} ({', '.join(records) or 'none'}): only "
            "one can be audited as an update"
        )
    return next(iter(records.items()))


def _matching_record(sent: SentWeights, key: str, after: ArrayRecord) -> Mapping[str, Array]:
    """Return the arrays that were sent and that the reply's belong to."""
    if not sent.arrays:
        raise UnreadableError("expected weights in the message that is replied to, got none: nothing to compare with")
    candidates = [record for record in sent.arrays.values() if record.keys() >= after.keys()]
    before = sent.arrays[key] if key in sent.arrays else candidates[0] if len(candidates) == 1 else None
    if before is None:
        raise UnreadableError(
            f"expected one record among those sent that the reply's {key!r} belongs to, got {', '.join(sent.arrays)}"
        )
    if strange := [name for name in after if name not in before]:
        raise UnreadableError(f"expected arrays that were sent, too, got {strange[0]!r} only in the reply")
    return before


def _tensor(name: str, array: Array, as_sent: str) -> Tensor:
    """Return an array as a tensor; one of float64 in float32 where that is what comes back.

    Strategies of Flower that step by NumPy send float64, which a network of float32 rounds when it is loaded.
    """
    try:
        found = to_tensor(np.array(array.numpy()))
    except (TypeError, ValueError) as error:
        raise UnreadableError(f"expected numbers under {name!r}, got an array that can't be read: {error}") from error
    return found.float() if found.dtype == torch.float64 and as_sent == "float32" else found


def _joined(records: Mapping[str, ConfigRecord] | Mapping[str, MetricRecord]) -> dict[str, Any]:
    """Return the entries of all records, by name; of equal names that of the first record."""
    found: dict[str, Any] = {}
    for record in records.values():
        for key, value in record.items():
            found.setdefault(key, value)
    return found


def _look_up(entries: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return what the first of some names stands for, hyphens or underscores; None where there is none of them."""
    known = {str(key).lower().replace("_", "-"): value for key, value in entries.items()}
    return next((known[name] for name in names if name in known), None)


def _facts_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that a config states, as far as their values can be such."""
    found = {fact: _look_up(config, names) for fact, names in CONFIG_NAMES.items()}
    said = {
        name: value.lower() if name == "optimizer" and isinstance(value, str) else value
        for name, value in found.items()
    }
    return usable_facts({name: value for name, value in said.items() if value is not None})


def _only_known(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts that are stated; those of an optimizer only together with it."""
    stated = {name: value for name, value in facts.items() if value is not None}
    return {name: value for name, value in stated.items() if name not in OPTIMIZER_FACTS or "optimizer" in stated}
