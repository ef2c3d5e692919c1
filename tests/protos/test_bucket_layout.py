"""What nodes say of a bucket's files beforehand is what the coordinator finds in them."""

from __future__ import annotations

import pytest
import torch

from dtfm.node.model.bucket import BucketSpec
from dtfm.node.state.snapshot_files import file_header, file_layout
from dtfm.protos.bucket_layout import LAYOUT_BYTES, LENGTH_BYTES, layout_digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_file_has_the_layout_that_its_node_says_beforehand(dtype: torch.dtype) -> None:
    nothing = (("z", (0,)), ("y", (0, 2)))
    spec = BucketSpec(2, (2,), (("z.weight", (3, 4)), *nothing, ("a.bias", (3,)), ("scale", ())))
    whole, weights = (file_header(spec, dtype, weights=alone)[LENGTH_BYTES:] for alone in (False, True))
    each = spec.size * dtype.itemsize
    assert layout_digest(whole, 3 * each) + layout_digest(weights, each) == file_layout(spec, dtype)
    assert len(file_layout(spec, dtype)) == LAYOUT_BYTES


def test_another_header_or_size_has_another() -> None:
    assert layout_digest(b"header", 8) not in (layout_digest(b"Header", 8), layout_digest(b"header", 9))
