"""Decoder sublayers shared by targets and drafters."""
