"""The paper: its tables as data, what it claims, and the reproduction of both."""
