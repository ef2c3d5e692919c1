"""What `plan` is made of."""
