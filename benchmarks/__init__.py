"""Measurements: each module has ``main(args) -> exit code`` and is run by ``headrace bench NAME``."""
