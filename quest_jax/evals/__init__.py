"""Measurements of what a policy keeps of dense attention's answers."""
