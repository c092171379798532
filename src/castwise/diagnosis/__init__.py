"""Where a number that is not finite comes from: `castwise.diagnose`, and replays of recorded steps."""
