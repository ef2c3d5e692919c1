"""How the run fares: the verdict, and the facts behind it."""
