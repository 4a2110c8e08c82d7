"""Data: data sets, corruptions, scenarios and networks."""
