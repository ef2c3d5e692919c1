"""The codecs of the run file, and what of it may change while a run trains."""
