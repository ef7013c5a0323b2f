"""The composition root: the only place that chooses backends and puts the parts together."""
