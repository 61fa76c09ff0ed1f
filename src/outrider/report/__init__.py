"""`outrider report`: what the verbs have measured, as one self-contained HTML page."""
