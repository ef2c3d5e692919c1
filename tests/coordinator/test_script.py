"""The scripted world itself."""

from __future__ import annotations

import pytest

from tests.coordinator.script import World


def test_finish_run_names_a_step_that_never_comes_about() -> None:
    world = World()
    world.join("a", "b")  # the plan is adopted, and has not begun
    with pytest.raises(AssertionError, match="step 1 does not come about: Switching"):
        world.finish_run()
