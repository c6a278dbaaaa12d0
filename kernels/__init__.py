"""Device code: one folder for each arch, with the same file names, and what they share."""
