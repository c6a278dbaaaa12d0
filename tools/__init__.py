"""Command-line work beside the library: demo, filling the cache, timing, sanitizer."""
