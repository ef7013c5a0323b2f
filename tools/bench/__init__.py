"""`whalepod bench serve`: load, trace replay, and statistics."""
