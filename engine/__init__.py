"""The speculative decoding engine: drafters guess, a vote chooses, the target checks."""
