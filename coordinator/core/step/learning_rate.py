"""The learning rate: a pure function of the run and the step."""

from __future__ import annotations

import math

from dtfm.protos.plan_pb2 import CONSTANT, LINEAR, WARMUP_STABLE_DECAY, Run


def learning_rate(train: Run.Train, step: int) -> float:
    """The learning rate of ``step`` (from 1).

    It rises linearly to ``train.learning_rate`` during the warm-up. From there it falls to the final fraction of that, which it
    has at the last step: along a cosine, along a line, or, for warmup-stable-decay (Hu et al., arXiv 2404.06395), along a line
    in the last decay_steps alone; or it stays.
    """
    if step <= train.warmup_steps:
        return train.learning_rate * step / train.warmup_steps
    if train.schedule == CONSTANT:
        return train.learning_rate
    first = train.warmup_steps  # the last step at the full rate
    if train.schedule == WARMUP_STABLE_DECAY:
        first = max(first, train.steps - train.decay_steps)
    fallen = min(max(step - first, 0) / max(train.steps - first, 1), 1.0)
    left = 1 - fallen if train.schedule in (LINEAR, WARMUP_STABLE_DECAY) else 0.5 * (1 + math.cos(math.pi * fallen))
    final = train.final_learning_rate_fraction
    return train.learning_rate * (final + (1 - final) * left)
