"""Codecs: tensors to wire bytes and back."""
