"""The gateway process: HTTP on one side, an engine on the other."""
