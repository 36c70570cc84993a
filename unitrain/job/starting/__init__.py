"""Starting the processes of a job, and starting them again."""
