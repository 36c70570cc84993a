"""Which sample comes when, and on which rank."""
