"""The gateway process: HTTP in front, engines behind."""
