"""The codecs that a node may send with: the run file's, or with "auto" a few that the node chooses from."""

from __future__ import annotations

from collections.abc import Mapping

from dtfm.protos.run_file.network_table import Network

TENSORS = ("activations", "gradients", "reduction")

AUTO = ("off", "raw16", "i8b256")
"""With "auto" in the run file, a node chooses among these by its links (node/training/codec_choice.py)."""


def allowed_codecs(network: Network, tensors: str) -> tuple[str, ...]:
    """The names in the run file of the codecs that ``tensors`` (one of TENSORS) may be sent with."""
    named = {"activations": network.activations, "gradients": network.gradients, "reduction": network.reduction}
    return AUTO if named[tensors] == "auto" else (named[tensors],)


def codec_in_use(network: Network, told: Mapping[str, str], tensors: str) -> str:
    """The codec of these tensors on a link. The sender has ``told`` which codec it uses. Only a codec that the run allows
    counts."""
    allowed = allowed_codecs(network, tensors)
    said = told.get(tensors)
    return said if said in allowed else allowed[0]
