"""Where threads of a node wait for what comes next."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

Topic = TypeVar("Topic", bound=Hashable)
Item = TypeVar("Item")


class Closed(Exception):
    """The mailbox was closed while, or before, somebody waited on it; the message says why."""


class Mailbox(Generic[Topic, Item]):
    """Queues by topic, between threads. Closing it wakes every waiter: nobody waits for a message that cannot come.

    It does not bound itself; who puts in must (frames are bounded by admission, see admission.py).
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._queues: dict[Topic, deque[Item]] = {}
        self._closed: str | None = None

    def put(self, topic: Topic, item: Item) -> None:
        with self._condition:
            self._queues.setdefault(topic, deque()).append(item)
            self._condition.notify_all()

    def get(self, topic: Topic) -> Item:
        """The next item of ``topic``, waiting for it. Raises Closed."""
        with self._condition:
            while True:
                if self._closed is not None:
                    raise Closed(self._closed)
                if queue := self._queues.get(topic):
                    return queue.popleft()
                self._condition.wait()

    def get_nowait(self, topic: Topic) -> Item | None:
        """The next item of ``topic``, or None. Raises Closed."""
        with self._condition:
            if self._closed is not None:
                raise Closed(self._closed)
            queue = self._queues.get(topic)
            return queue.popleft() if queue else None

    def forget(self, topic: Topic) -> None:
        with self._condition:
            self._queues.pop(topic, None)

    def close(self, reason: str) -> None:
        with self._condition:
            self._closed = self._closed or reason
            self._condition.notify_all()
