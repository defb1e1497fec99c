"""A Grid whose nodes live in this process: for tests of an app, and for measuring without a network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

_APP_RAISED = 2  # Flower's code for an exception in a ClientApp


class LocalGrid(Grid):
    """Nodes in this process: every message runs the ClientApp when its reply is pulled.

    No SuperLink, no sockets, no processes: a federation of 200 clients costs what their training costs. Replies
    come in the order in which they are asked for, one in memory at a time.

    Args:
        app: the ClientApp of all nodes.
        nodes: how many; node i has the node config {"partition-id": i, "num-partitions": nodes}.
        run_config: what the apps find in `context.run_config`.

    >>> from flwr.clientapp import ClientApp
    >>> LocalGrid(ClientApp(), nodes=3).get_node_ids()
    [100, 101, 102]
    """

    def __init__(self, app: ClientApp, nodes: int, run_config: Mapping[str, Any] | None = None) -> None:
        if vars(TaskIdentity)["_run_id"] is None:  # inside a Flower process it is set, and must stay as it is
            TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self._app = app
        self._sent: dict[str, Message] = {}
        self._count = 0
        self._contexts = {
            100 + i: Context(
                run_id=1,
                node_id=100 + i,
                node_config={"partition-id": i, "num-partitions": nodes},
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for i in range(nodes)
        }

    def handle(self, message: Message) -> list[Message]:
        """The replies to a message, usually one. A test overrides this to lose, delay or forge some."""
        try:
            return [self._app(message, self._contexts[message.metadata.dst_node_id])]
        except Exception as error:  # as Flower does, text and all
            return [Message(Error(_APP_RAISED, repr(error)), reply_to=message)]

    def get_node_ids(self) -> list[int]:
        """Ids of the nodes."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Take messages; nothing runs yet."""
        names = []
        for message in messages:
            self._count += 1
            name = f"message-{self._count}"
            message.metadata.__dict__["_message_id"] = name
            self._sent[name] = message
            names.append(name)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Run what was sent under these ids and return the replies; those without any are asked for again."""
        replies: list[Message] = []
        for name in message_ids:
            if name in self._sent and (found := self.handle(self._sent[name])):
                del self._sent[name]
                replies.extend(found)
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push, and pull once."""
        return self.pull_messages(self.push_messages(messages))

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """A message to a node."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def set_run(self, run: Run) -> None:
        """There is one run."""

    @property
    def run(self) -> Run:
        """There is no run behind this grid."""
        raise RuntimeError("a LocalGrid belongs to no Flower run")
