"""Communication between ranks: backends, collectives, and the transfer of objects and tensors."""
