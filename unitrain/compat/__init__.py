"""Interfaces of other libraries on UniTrain's backends. Each folder can be deleted, and the rest works without it."""
