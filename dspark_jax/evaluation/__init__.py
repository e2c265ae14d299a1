"""Measure drafters: tasks, generation side by side with plain decoding, statistics, tables and plots."""
