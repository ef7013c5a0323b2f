"""How rows are written into records and taken out again: in torch, and compiled for CPUs."""
