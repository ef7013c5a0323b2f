"""One file for each model family: how its text divides into reasoning, content and tool calls."""
