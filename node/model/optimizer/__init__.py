"""The updates of a stage's state: AdamW, Muon, and the outer step of exchanges."""
