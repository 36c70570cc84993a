"""Who started the processes, how they meet, and how to start some."""
