"""For all tests: one thread per process, as there are often more processes than cores."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
