"""Whole jobs on real processes: what they gain, what harm costs them, and one plain process beside them."""
