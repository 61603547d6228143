"""Golden files of all losses, computed by the systems' own functions in float64. Entry point: `../generate.py`."""
