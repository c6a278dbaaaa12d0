"""Runs the PTX of compiled kernels on the CPU: numbers, layouts, barriers and order, no speed."""
