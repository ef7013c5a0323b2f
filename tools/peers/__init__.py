"""Comparisons with llama.cpp and vLLM; not shipped."""
