"""The engine process: receive, schedule, run, finish, send."""
