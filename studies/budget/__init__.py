"""Study what adapting costs, and where it harms."""
