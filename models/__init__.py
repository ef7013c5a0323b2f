"""DeepSeek-V3-style models, from the checkpoint to hidden states and logits."""
