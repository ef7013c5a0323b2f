"""Keeps the cached prompts of different tenants apart."""

from __future__ import annotations

import hashlib
import hmac
import secrets

import orjson


class CacheSalt:
    """Turns what a request says about sharing into the salt of its prefix hashes.

    The salt is keyed with a secret of this process: nobody can guess it, and what clients chose
    as their secret is in no message and no journal.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def __call__(self, *wishes: str | None) -> str:
        """Return one salt for equal wishes (`cache_salt`, `prompt_cache_key`); "" for none."""
        if not any(wishes):
            return ""
        text = orjson.dumps([wish or "" for wish in wishes])
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()[:32]
