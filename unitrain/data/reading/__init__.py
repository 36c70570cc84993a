"""Reading samples: datasets, workers, streams, devices."""
