"""This package leads from a request to a launch: it chooses kernels, makes plans and keeps calls."""
