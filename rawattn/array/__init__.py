"""Arrays of all libraries: what a call reads of them, how results are made, tensor maps."""
