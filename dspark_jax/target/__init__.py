"""The frozen language model: transformer, loading, tokenizer."""
