"""Tensor operations behind one interface: `interface.py` is the contract, `reference.py` the meaning."""
