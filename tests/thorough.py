"""How much of a sweep is run: `make test` runs a part of it, `make thorough` all of it."""

import os

THOROUGH = os.environ.get("CASTWISE_THOROUGH") == "1"
