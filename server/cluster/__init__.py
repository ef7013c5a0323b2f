"""Ranks that serve one model together: their steps, their membership, their processes."""
