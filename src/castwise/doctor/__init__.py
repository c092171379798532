"""What a machine can do in which format, found out by asking and by measuring."""
