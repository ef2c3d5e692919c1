"""Names, types and shapes of what a bucket's file has: nodes and the coordinator come to the same digest of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from dtfm.node.model.bucket import BucketSpec
from dtfm.node.state.snapshot_files import file_header, file_layout
from dtfm.protos.bucket_layout import LAYOUT_BYTES, LENGTH_BYTES, layout_digest, layout_of_file

A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
B = {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}


def read(entries: dict[str, Any], size: int = 16) -> bytes:
    return layout_of_file(json.dumps(entries).encode(), size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_file_has_the_layout_that_its_node_says_beforehand(dtype: torch.dtype) -> None:
    nothing = (("z", (0,)), ("y", (0, 2)))
    spec = BucketSpec(2, (2,), (("z.weight", (3, 4)), *nothing, ("a.bias", (3,)), ("scale", ())))
    header = file_header(spec, dtype)
    assert layout_of_file(header[LENGTH_BYTES:], 3 * spec.size * dtype.itemsize) == file_layout(spec, dtype)
    assert len(file_layout(spec, dtype)) == LAYOUT_BYTES


def test_it_says_which_tensor_lies_where_and_nothing_of_the_order_in_which_a_header_names_them() -> None:
    assert read({"x": A, "y": B}) == layout_digest([("x", "F32", [2]), ("y", "F32", [2])])
    assert read({"y": B, "__metadata__": {"format": "pt"}, "x": A}) == read({"x": A, "y": B})
    assert read({"y": A, "x": B}) != read({"x": A, "y": B})
    for other in ({"x": A, "z": B}, {"x": A, "y": {**B, "shape": [2, 1]}}, {"x": A, "y": {**B, "dtype": "I32"}}):
        assert read(other) != read({"x": A, "y": B})


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xff" * 10,
        b"[1]",
        b"[" * 100_000,
        b'{"x": 1}',
        b'{"x": {"dtype": "F32", "shape": 3, "data_offsets": [0, 16]}}',
        b'{"x": {"dtype": "F32", "shape": [4], "data_offsets": [0]}}',
        json.dumps({"x": A}).encode(),
        json.dumps({"x": A, "y": A}).encode(),
        b'{"x": %s, "x": %s}' % (json.dumps(A).encode(), json.dumps(B).encode()),
    ],
)
def test_what_is_no_header_or_does_not_fill_the_file_has_none(header: bytes) -> None:
    with pytest.raises(ValueError, match=r"it is no safetensors file|do not fill it"):
        layout_of_file(header, 16)
