"""UniTrain."""
