"""The trainings that ``unitrain verify`` and the contract compare with a plain loop on one device."""
