"""The run file's page in docs/, its codecs, and what of it may change while a run trains."""
