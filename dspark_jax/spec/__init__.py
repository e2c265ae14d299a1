"""Mathematics of speculative decoding with no network in it: verification, scheduling, calibration and statistics."""
