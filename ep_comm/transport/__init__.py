"""One-sided puts and signals between the ranks of a group, behind one interface."""
