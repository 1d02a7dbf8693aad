"""How many drafts to make and to verify: pure functions of numbers the host knows."""
