"""The computation: a frozen network whose normalisation is an argument, and pure functions to build methods from."""
