"""The control plane: membership, planning, the step ledger, the event store and the `dtfm-coordinator` command."""
