"""Tensor operations behind one interface, which `reference.py` defines in plain torch."""
