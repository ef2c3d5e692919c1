"""Reading: from the places that a run names to files, records, documents and conversations."""
