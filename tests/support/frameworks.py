"""Filters of NVFlare and mods of Flower themselves, on arrays; for tests that run where these packages are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl.seeds import stream


def updates(count: int, dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
    """Random updates of a small network, each at a size of its own, one tensor of them sparse."""
    found = []
    for number in range(count):
        draw = stream(number, "filtered")
        size = 10.0 ** float(torch.rand((), generator=draw) * 4 - 4)
        shapes = {"conv.weight": (4, 3, 3, 3), "fc.weight": (10, 30), "fc.bias": (10,)}
        update = {name: torch.randn(shape, generator=draw, dtype=dtype) * size for name, shape in shapes.items()}
        update["fc.weight"][:, ::7] = 0.0
        found.append(update)
    return found


def nvflare_filtered(own: Any, update: Mapping[str, Tensor], steps: int | None = None) -> dict[str, np.ndarray]:
    """What a DXO filter makes of a weight difference."""
    from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
    from nvflare.apis.fl_constant import ReturnCode
    from nvflare.apis.fl_context import FLContext

    meta = {} if steps is None else {MetaKey.NUM_STEPS_CURRENT_ROUND: steps}
    data = {name: value.numpy().copy() for name, value in update.items()}
    shareable = DXO(data_kind=DataKind.WEIGHT_DIFF, data=data, meta=meta).to_shareable()
    shareable.set_return_code(ReturnCode.OK)
    return dict(from_shareable(own.process(shareable, FLContext())).data)


def flower_sent(mod: Any, before: Mapping[str, Tensor], after: Mapping[str, Tensor], **config: float) -> Any:
    """The message that a client mod makes of a client's new weights."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # a message is of a running task

    def record(weights: Mapping[str, Tensor]) -> Any:
        return ArrayRecord({name: Array(value.numpy().copy()) for name, value in weights.items()})

    asked = Message(
        content=RecordDict({"arrays": record(before), "config": ConfigRecord(dict(config))}),
        dst_node_id=1,
        message_type="train",
    )
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})

    def client(message: Any, _: Any) -> Any:
        answer = {"arrays": record(after), "metrics": MetricRecord({"num-examples": 10})}
        return Message(content=RecordDict(answer), reply_to=message)

    return mod(asked, context, client)


def flower_update(message: Any, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Before minus after, of a message's arrays."""
    arrays = message.content["arrays"]
    return {name: value - torch.from_numpy(arrays[name].numpy().copy()) for name, value in before.items()}
