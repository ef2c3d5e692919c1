"""A run's curves at trackers: TensorBoard, Weights & Biases, trackio. Each is written from the log, and none holds up the run."""
