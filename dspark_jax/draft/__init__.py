"""Drafters: the contract, the parallel backbone (DSpark, DFlash), EAGLE-3, loading and saving."""
