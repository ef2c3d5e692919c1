"""Where a node's threads wait for tensors."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

from dtfm.node.host.work import WORK

Topic = TypeVar("Topic", bound=Hashable)
Item = TypeVar("Item")


class Closed(Exception):
    """The queue was closed before or while a thread waited on it; the message says why."""


class TopicQueue(Generic[Topic, Item]):
    """A queue per topic, between threads. Closing it wakes every waiter, so that none waits in vain.

    The queue is unbounded: its items must be bounded elsewhere (frames are, by frame_validation.py).
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
        """The next item of ``topic``; waits for it. Raises Closed."""
        with self._condition:
            while True:
                if self._closed is not None:
                    raise Closed(self._closed)
                if queue := self._queues.get(topic):
                    return queue.popleft()
                with WORK.waiting():
                    self._condition.wait()

    def get_nowait(self, topic: Topic) -> Item | None:
        """The next item of ``topic``, or None. Raises Closed."""
        with self._condition:
            if self._closed is not None:
                raise Closed(self._closed)
            queue = self._queues.get(topic)
            return queue.popleft() if queue else None

    def forget(self, topic: Topic) -> None:
        """Drops the topic's queue."""
        with self._condition:
            self._queues.pop(topic, None)

    def close(self, reason: str) -> None:
        with self._condition:
            self._closed = self._closed or reason
            self._condition.notify_all()
