"""Pictures and figures of what happened in a run."""
