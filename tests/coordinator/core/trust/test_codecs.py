"""Which codecs a node may say that it uses."""

from __future__ import annotations

import pytest

from dtfm.coordinator.config.codecs import AUTO, TENSORS, allowed_codecs, codec_in_use
from dtfm.node.training.codec_choice import GENTLEST_FIRST
from dtfm.protos.run_file.network_table import Network


def test_nodes_choose_among_the_codecs_of_auto() -> None:
    assert tuple(codec.name.lower() for codec in GENTLEST_FIRST) == AUTO


@pytest.mark.parametrize("tensors", TENSORS)
def test_where_the_run_leaves_the_choice_the_word_of_a_node_counts_among_these(tensors: str) -> None:
    network = Network()
    assert allowed_codecs(network, tensors) == AUTO
    assert codec_in_use(network, {tensors: "i8b256"}, tensors) == "i8b256"
    assert codec_in_use(network, {tensors: "i4b64"}, tensors) == "off"
    assert codec_in_use(network, {}, tensors) == "off"


@pytest.mark.parametrize("tensors", TENSORS)
def test_where_the_run_names_a_codec_it_is_that_one_whatever_a_node_says(tensors: str) -> None:
    network = Network(compression="i4b64")
    assert codec_in_use(network, {tensors: "i8b256"}, tensors) == "i4b64"
