"""The study of guard and alarms."""
