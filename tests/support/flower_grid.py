"""Flower's grid without processes or a network: every message is answered here, by the app itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

RUN = 7
FIRST_NODE = 100


class LocalGrid(Grid):
    """Nodes 100, 101, ... of partitions 0, 1, ..., which one app serves in order."""

    def __init__(
        self, app: Callable[[Message, Context], Message], nodes: int = 2, run_config: Mapping[str, Any] | None = None
    ) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN, 1, 1
        self.app = app
        self.replies: list[Message] = []
        self.contexts = {
            FIRST_NODE + i: Context(
                RUN, FIRST_NODE + i, {"partition-id": i, "num-partitions": nodes}, RecordDict(), dict(run_config or {})
            )
            for i in range(nodes)
        }

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        found = [self.app(message, self.contexts[message.metadata.dst_node_id]) for message in messages]
        self.replies += found
        return found

    def set_run(self, run: object) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **settings: Any) -> Message:
        raise NotImplementedError

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError
