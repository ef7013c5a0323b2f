"""Tensor operations behind one interface: `interface.py` says what, `reference.py` means it."""
