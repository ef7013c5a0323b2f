"""The limits of one HTTP request, in one place."""

from __future__ import annotations

MAX_JSON_DEPTH = 64
MAX_NUM_STOPS = 16
MAX_STOP_CHARS = 256
MAX_NUM_CHOICES = 128
"""Prompts times `n` of one request."""
MAX_NUM_MESSAGES = 4096
MAX_NUM_TOOLS = 1024
MAX_FORCED_CALLS = 16
"""Parallel calls of an answer that must call something."""
MAX_GRAMMAR_CHARS = 256 * 1024
MAX_NUM_CHOICE_TEXTS = 4096
GRAMMAR_TIMEOUT_S = 10.0
"""A grammar that takes longer to compile is refused."""
MAX_FUNCTION_NAME_CHARS = 128
MAX_NUM_LOGIT_BIASES = 1024
MAX_NUM_STOP_TOKEN_IDS = 256
MAX_SHORT_TEXT_CHARS = 512
"""`user`, `cache_salt`, `model` and other names."""

MAX_NUM_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_STORED_RESPONSES = 1024
MAX_STORED_RESPONSES_BYTES = 64 * 1024 * 1024
"""All that `previous_response_id` can refer to; the oldest leave first."""
MIN_THINKING_BUDGET_TOKENS = 1024
"""Anthropic's."""

BODY_TIMEOUT_S = 60.0
"""A body must have arrived by then: a client that sends a byte a second holds no connection."""
MAX_CONNECTIONS = 50_000
"""Open at once, and fewer where the process may open fewer files."""
MAX_HEAD_BYTES = 64 * 1024
"""Of the request line and the headers, as far as they come in several pieces."""
HEAD_TIMEOUT_S = 20.0
"""The same for the request line and the headers."""
UNREAD_TIMEOUT_S = 30.0
"""In this time a client takes at least `MIN_READ_BYTES` of what waits for it, or is cut off."""
MIN_READ_BYTES = 64 * 1024
REST_OF_BODY_S = 5.0
"""How long a body may go on once its request is answered: then the connection is closed."""
LAST_EVENT_S = 5.0
"""How long the end of a stream may take to be sent once its request is too late, or aborted."""
START_WAIT_S = 0.25
"""How long a stream waits for a refusal before it answers 200 and sends its headers."""
NUM_TOKENIZER_THREADS = 2
MAX_PENDING_TOKENIZATIONS = 1024
