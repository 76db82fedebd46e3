"""Trained networks below 8 bits: what is measured, what it must reach, and the rows that come of it."""
