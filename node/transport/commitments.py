"""What a node has sent to its peers for a step, and for an evaluation right before it, and what it got from them, by digest. In
its vote it commits to them."""

from __future__ import annotations

import threading
from collections import defaultdict
from concurrent.futures import Future

from blake3 import blake3

from dtfm.kernels.codec import Encoded
from dtfm.node.transport.receiver import Arrival
from dtfm.node.transport.sender import What
from dtfm.protos.control_pb2 import StepReady
from dtfm.protos.frame import Kind

COMMITMENT_BYTES = 16

#: By peer and kind, and by index and part: the digest.
_Ledger = defaultdict[tuple[str, Kind], dict[tuple[int, int], "Future[bytes]"]]


def commitment(codec: int, encoded: memoryview) -> bytes:
    """BLAKE3 (COMMITMENT_BYTES) of the codec (1 byte) and the encoded bytes of a tensor: the same at both ends of a link."""
    return blake3(bytes([codec])).update(encoded).digest(length=COMMITMENT_BYTES)


class Commitments:
    """Those of one step, and of an evaluation right before it. A digest is taken in the thread that calls, or that encodes. For
    any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: _Ledger = defaultdict(dict)
        self._received: _Ledger = defaultdict(dict)
        self._taken: dict[tuple[Kind, int, int], Future[bytes]] = {}

    def sends(self, peer: str, what: What, encoded: Future[Encoded]) -> None:
        """To be called before a tensor is sent. Its digest is taken once it is encoded, or now if it is. A tensor for several
        peers is the same, so its digest is taken once."""
        key, digest = (what.kind, what.index, what.part), Future[bytes]()
        with self._lock:
            known = self._taken.setdefault(key, digest)
            self._sent[peer, what.kind][what.index, what.part] = known
        if known is digest:
            encoded.add_done_callback(lambda done: _settle(digest, done))

    def came(self, arrival: Arrival) -> None:
        """To be called before the memory of ``arrival`` changes."""
        header, digest = arrival.header, Future[bytes]()
        digest.set_result(commitment(header.codec, arrival.encoded))
        with self._lock:
            self._received[arrival.source, header.kind][header.index, header.part] = digest

    def report(self) -> tuple[list[StepReady.Passed], list[StepReady.Passed]]:
        """(sent tensors, received tensors), once the step is done here; waits for tensors that are still being encoded."""
        with self._lock:
            ledgers = [{key: dict(digests) for key, digests in of.items()} for of in (self._sent, self._received)]
        sent, received = ([_passed(*key, digests) for key, digests in sorted(of.items())] for of in ledgers)
        return sent, received


def _passed(peer: str, kind: Kind, digests: dict[tuple[int, int], Future[bytes]]) -> StepReady.Passed:
    places = sorted(digests)
    return StepReady.Passed(
        peer=peer,
        kind=kind,
        indices=[index for index, _ in places],
        parts=[part for _, part in places],
        digests=b"".join(digests[place].result() for place in places),
    )


def _settle(digest: Future[bytes], encoded: Future[Encoded]) -> None:
    try:
        of = encoded.result()
        digest.set_result(commitment(of.codec, of.data))
    except BaseException as error:  # the step has failed, and says so
        digest.set_exception(error)
