"""Which tokens are computed when, and where their keys live: decisions without tensors."""
