"""How the text of an answer divides into reasoning, content and tool calls, by chat template."""
