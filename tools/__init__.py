"""Command line and offline tools."""
