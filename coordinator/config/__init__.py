"""The codecs of the run file, and the keys that may change while a run trains."""
