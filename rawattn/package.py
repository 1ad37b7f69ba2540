"""The version of the package, and the folder where it is installed."""

import pathlib

__version__ = "0.1.0"
FOLDER = pathlib.Path(__file__).parent
