"""Measurements for those who work on whalepod: the model alone, steps, ranks; not shipped."""
