"""Generates the text that the embedded model is trained and judged on: seeded, no download."""
