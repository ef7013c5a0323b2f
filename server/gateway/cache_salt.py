"""Keeps the cached prompts of different tenants apart."""

from __future__ import annotations

import hashlib
import hmac
import secrets


class CacheSalt:
    """Turns what a request says about sharing into the salt of its prefix hashes.

    The salt is keyed with a secret of this process: nobody can guess it, and what clients chose
    as their secret is in no message and no journal.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def __call__(self, wish: str | None) -> str:
        """Return one salt for equal values of `cache_salt`; "" for none."""
        if not wish:
            return ""
        return hmac.new(self._secret, wish.encode(), hashlib.sha256).hexdigest()[:32]
