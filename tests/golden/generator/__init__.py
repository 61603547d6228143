"""Golden files for the loss family, made with the systems' own functions in float64. Entry: `../generate.py`."""
