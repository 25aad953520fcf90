"""Networks on a mesh of elements: partition, place, route, simulate, emit. Each stage takes the one before's result."""
