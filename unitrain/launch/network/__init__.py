"""Where the ranks meet: addresses, interfaces, stores."""
