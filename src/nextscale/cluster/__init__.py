"""Work shared out among processes with a pipeline each, on this machine or on many."""
