"""Device code that no arch owns."""
