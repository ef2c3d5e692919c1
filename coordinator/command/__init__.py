"""The subcommands of `dtfm-coordinator`, and the options they share."""
