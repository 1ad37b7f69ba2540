"""From a request to a launch: the choice of a kernel, and plans."""
