"""dtfm: train one foundation model on single GPUs in different places.

The packages live in the folders beside this one (``node/`` is ``dtfm.node``); the links here give them one import name.
"""

import os

# Set before grpc is imported, which reads it then. Users need no message when a peer closes its connection normally.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

__version__ = "0.1.0"
