"""One phase on the wire: requests out, replies in as they arrive, each counted once and for the right phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import httpx
from flwr.app import Message
from flwr.serverapp import Grid

from fedlaw.flower.federation import log
from fedlaw.flower.layout import Fault

_REMEMBERED = 2  # phases whose message ids are kept, to tell a late reply from a stray one


class Arrival(NamedTuple):
    """A reply, or why there is none, of one node; seconds since the request was sent."""

    node: int
    reply: Message | Fault
    seconds: float


class Exchange:
    """Sends the requests of a phase and yields what comes back.

    Replies belong to whom was asked, by the id of the request: errors that SuperLink makes carry its own node id.
    They are pulled one at a time, so that one of them is in memory at once, and a message that cannot even be
    decoded is the loss of its sender alone.

    Args:
        grid: Flower's.
        poll: seconds between two looks.
        clock, sleep: of the waiting.
    """

    def __init__(
        self,
        grid: Grid,
        poll: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._grid = grid
        self._poll = poll
        self._clock = clock
        self._sleep = sleep
        self._past: list[dict[str, int]] = []

    def run(self, messages: Iterable[Message], timeout: float) -> Iterator[Arrival]:
        """Send `messages` and yield replies for at most `timeout` seconds; every node yields at least once."""
        requests = list(messages)
        begun = self._clock()
        pushed = self._push(requests)
        asked = {name: message.metadata.dst_node_id for name, message in pushed if name}
        for name, message in pushed:
            if not name:
                yield Arrival(message.metadata.dst_node_id, Fault.NOT_SENT, 0.0)
        open_ids = dict(asked)
        while open_ids:
            for name in list(open_ids):
                yield from self._pull(name, asked, open_ids, begun)
            if not open_ids or self._clock() >= begun + timeout:
                break
            self._sleep(max(0.0, min(self._poll, begun + timeout - self._clock())))
        for node in open_ids.values():
            yield Arrival(node, Fault.NO_REPLY, self._clock() - begun)
        self._past = [asked, *self._past][:_REMEMBERED]

    def _push(self, requests: list[Message]) -> list[tuple[str | None, Message]]:
        """Each request with the id it was sent under; None: it was not."""
        names = list(self._grid.push_messages(requests)) if requests else []
        if len(names) == len(requests):
            return list(zip(names, requests, strict=True))
        sent = set(names)  # some grids leave out what they could not send
        own = (message.metadata.message_id for message in requests)
        return [(name if name in sent else None, m) for name, m in zip(own, requests, strict=True)]

    def _pull(
        self, name: str, asked: dict[str, int], open_ids: dict[str, int], begun: float
    ) -> Iterator[Arrival]:
        if name not in open_ids:
            return
        try:
            replies = list(self._grid.pull_messages([name]))
        except (httpx.HTTPError, OSError):
            raise  # the link itself: nobody's reply is to blame
        except Exception as error:  # decoding an untrusted message can fail in any way
            log.warning("a reply of node %d cannot be decoded (%s)", open_ids[name], type(error).__name__)
            yield Arrival(open_ids.pop(name), Fault.UNREADABLE, self._clock() - begun)
            return
        for reply in replies:
            seconds, to = self._clock() - begun, reply.metadata.reply_to_message_id
            if to in open_ids:
                node = open_ids.pop(to)
                forged = reply.has_content() and reply.metadata.src_node_id != node
                yield Arrival(node, Fault.FORGED if forged else reply, seconds)
            elif to in asked:
                yield Arrival(asked[to], Fault.DUPLICATE, seconds)
            elif any(to in past for past in self._past):
                node = next(past[to] for past in self._past if to in past)
                yield Arrival(node, Fault.LATE, seconds)
            else:
                log.warning("dropped a message that answers nothing that was asked")
