"""Command-line work beside the library: filling the cache ahead of time, and timing."""
