"""The watchdog: who is alive, who has failed, when to stop."""
