"""`whalepod eplb`: where experts lie, what their loads were, and where they should lie."""
