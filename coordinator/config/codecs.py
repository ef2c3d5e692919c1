"""Which codecs a node may send with: what the run file says, or where that is "auto", one of a few that the node chooses."""

from __future__ import annotations

from collections.abc import Mapping

from dtfm.protos.run_file.tables import Network

TENSORS = ("activations", "gradients", "reduction")

AUTO = ("off", "raw16", "i8b256")
"""Those that a node chooses from by its links where the run file says "auto" (node/training/compression.py)."""


def allowed_codecs(network: Network, tensors: str) -> tuple[str, ...]:
    """The codecs with which ``tensors`` (one of TENSORS) may be sent, by their names in the run file."""
    named = {"activations": network.activations, "gradients": network.gradients, "reduction": network.reduction}
    return AUTO if named[tensors] == "auto" else (named[tensors],)


def codec_in_use(network: Network, told: Mapping[str, str], tensors: str) -> str:
    """The codec of these tensors on a link. Its sender has ``told`` which it uses; only one that the run allows counts."""
    allowed = allowed_codecs(network, tensors)
    said = told.get(tensors)
    return said if said in allowed else allowed[0]
