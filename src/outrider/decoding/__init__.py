"""draft -> schedule -> verify -> commit: the rounds that turn a drafter and a target into text."""
