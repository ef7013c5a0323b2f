"""Load balancing of experts: where replicas lie, who is sent to which, how they move."""
