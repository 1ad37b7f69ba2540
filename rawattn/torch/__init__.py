"""This package has the operators of torch, their gradients, transforms and sharding."""
