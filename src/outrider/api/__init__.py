"""`outrider.load` (model.py), and which drafter a choice means (drafter.py); the command line uses both."""
