"""Detection and measurement of the formats that a machine supports."""
