"""Decoding: the round's programs, the fixed batch of slots, generation."""
