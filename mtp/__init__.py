"""Multi-token prediction: drafting with the checkpoint's own module, and verifying."""
