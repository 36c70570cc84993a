"""Parts of ppo.py."""
