"""Plans on behalf of the core: compiling the scheduler, its thread, and one question after the other."""
