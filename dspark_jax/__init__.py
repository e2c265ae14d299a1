"""DSpark speculative decoding in JAX: train, measure and run drafters."""
