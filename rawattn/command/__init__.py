"""This package holds the commands of ``python -m rawattn``."""
