"""The shell around the core: gRPC, start-up, the planner's thread."""
