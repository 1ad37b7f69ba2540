"""This package reads and makes arrays of all libraries, and knows tensor maps."""
