"""The fast engine for ALFWorld games."""
