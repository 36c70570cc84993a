"""Communication between ranks: backends, collectives, and what is sent."""
