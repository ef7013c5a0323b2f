"""The processes of a server: gateway, engine, and the messages between them."""
