"""torch's operators, their gradients, transforms and sharding."""
