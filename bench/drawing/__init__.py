"""Pictures of measurements: `python -m bench draw`."""
