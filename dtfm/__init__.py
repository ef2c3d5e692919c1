"""dtfm: train one foundation model on single GPUs in different places.

The packages live in the folders beside this one (``node/`` is ``dtfm.node``); the links here give them one import name.
"""

__version__ = "0.1.0"
