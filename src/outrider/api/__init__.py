"""Which drafter a choice means: shared by the command line and the Python API."""
