"""`outrider serve`: OpenAI's API over the engine."""
