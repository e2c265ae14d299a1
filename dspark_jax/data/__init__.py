"""Training data: chat rendering and loss masks, conversation files, packing, batches, the target cache."""
