"""How the run fares: the verdict, and what it rests on."""
