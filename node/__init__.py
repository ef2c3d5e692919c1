"""One daemon on one device: its stage of the model, its links, its replica group and the `dtfm-node` command."""
