"""Pictures of what was measured: `python -m bench draw`."""
