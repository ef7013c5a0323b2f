"""Dispatch and combine of tokens between the ranks that own the experts."""
