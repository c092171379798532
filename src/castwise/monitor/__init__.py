"""What happened to the numbers of a training: telemetry, the cause of a skipped step, advice and a report."""
