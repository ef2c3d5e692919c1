"""What layers cost: time, and the memory that they keep."""
