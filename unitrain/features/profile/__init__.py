"""Profiles of a few steps of several ranks, in one trace."""

from unitrain.features.profile.profile import Profile

__all__ = ["Profile"]
