"""Whether the job's processes live, what each is doing, and how they agree to stop: beside training, and not in it."""
