"""Studies: what was measured to choose and to judge parts of the library, with results and conclusions."""
