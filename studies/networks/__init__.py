"""The study of networks that others wrote."""
