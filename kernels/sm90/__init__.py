"""Hopper (sm_90a)."""
